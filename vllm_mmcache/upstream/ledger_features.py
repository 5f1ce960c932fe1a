# SPDX-License-Identifier: Apache-2.0
"""The ledger's entries of the group `features`. Data only."""

from functools import partial

from vllm_mmcache.upstream.swap import TESTED_VLLM, Swap

_feature = partial(
    Swap,
    group="features",
    vllm=TESTED_VLLM,
    on_mismatch="off",
    process="worker",
    upstream=(
        "vLLM's encoder-cache connector makes the scheduler promise what only the worker can load; a promise that "
        "fails ends the engine with `Encoder cache miss`"
    ),
    remove_when="a connector may decline an item in the worker, and is handed the item with its inputs",
)
# Runner V2 has `features.encode` in place of take and save. vLLM calls V1 deprecated, and neither 0.32 nor 0.33 says
# when it goes.
_of_v1 = partial(_feature, remove_when="vLLM drops model runner V1")

FEATURES: tuple[Swap, ...] = (
    _feature(
        name="features.watch",
        target="vllm.model_executor.model_loader.base_loader:BaseModelLoader.create_model",
        make="vllm_mmcache.features.vllm_side:watch_weights",
        args_used=(),
        why="vLLM's CPU kernels pack weights away, so those of the tower are known only while they are loaded",
    ),
    _feature(
        name="features.runs",
        target="vllm.v1.worker.gpu_model_runner:group_and_batch_mm_kwargs",
        also=("vllm.v1.worker.gpu.mm.encoder_runner:group_and_batch_mm_kwargs",),
        make="vllm_mmcache.features.vllm_side:count_runs",
        args_used=("mm_kwargs",),
        why="runs of the tower are counted, and image by image where asked, for every model class alike",
        upstream="none: enable_mm_processor_stats times requests, and waits for the device to do so",
        remove_when="vLLM counts the images that its encoder ran for",
    ),
    _of_v1(
        name="features.take",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._batch_mm_inputs_from_scheduler",
        make="vllm_mmcache.features.vllm_side:take_known",
        args_used=("scheduler_output",),
        why="an image whose features are stored needs no run of the vision tower",
    ),
    _feature(
        name="features.encode",
        target="vllm.v1.worker.gpu.model_states.interface:ModelState.execute_mm_encoder",
        make="vllm_mmcache.features.vllm_side:encode_unknown",
        args_used=("scheduled_encoder_inputs",),
        why="on runner V2: an image whose features are stored needs no run of the vision tower, the others are saved",
    ),
    _of_v1(
        name="features.save",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._cache_encoder_output",
        make="vllm_mmcache.features.vllm_side:save_new",
        args_used=("mm_hash", "output"),
        why="what the tower gave is to be found by later requests",
    ),
    _of_v1(
        name="features.reset",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.reset_encoder_cache",
        make="vllm_mmcache.features.vllm_side:doubt_weights",
        args_used=(),
        why="vLLM calls it when weights were replaced in place: features of the old weights must not be used",
    ),
    _feature(
        name="features.reset_v2",
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.reset_encoder_cache",
        make="vllm_mmcache.features.vllm_side:doubt_weights",
        args_used=(),
        why="the same on runner V2",
    ),
    _feature(
        name="features.update",
        target="vllm.v1.worker.gpu_worker:Worker.update_weights",
        make="vllm_mmcache.features.vllm_side:doubt_weights",
        args_used=(),
        why="weight transfer can write into parameters without the model's load_weights",
    ),
    _feature(
        name="features.updated",
        target="vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
        make="vllm_mmcache.features.vllm_side:doubt_weights",
        args_used=(),
        why="the end of a weight transfer processes what was received",
    ),
    _feature(
        name="features.close",
        target="vllm.v1.worker.gpu_worker:Worker.shutdown",
        make="vllm_mmcache.features.vllm_side:close_at_shutdown",
        args_used=(),
        why="features that wait for the disk are written before the worker ends",
    ),
)
