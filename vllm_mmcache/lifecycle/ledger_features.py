# SPDX-License-Identifier: Apache-2.0
"""The ledger's entries of the group `features`. Data only.

In the engine the store is vLLM's own ECConnectorBase, set on the scheduler; on runner V2 a rank's side is vLLM's own
ECConnector, set on the runner. Neither replaces a symbol.
"""

from functools import partial

from vllm_mmcache.hooking.hooks import TESTED_VLLM, Hook

_feature = partial(
    Hook,
    group="features",
    vllm=TESTED_VLLM,
    process="worker",
    upstream="none: a connector is handed neither the model nor the inputs of an item",
    remove_when="vLLM tells a connector of loaded and changed weights",
)

FEATURES: tuple[Hook, ...] = (
    _feature(
        name="features.arrive",
        target="vllm.v1.core.sched.scheduler:Scheduler.add_request",
        make="vllm_mmcache.components.features.engine.hooks:arrive",
        args_used=("request",),
        why="looking for an image's features begins when its request arrives, not when it is scheduled",
        process="engine",
        upstream="none: a connector first hears of a request when it could be scheduled",
        remove_when="a connector is told of a request when it arrives, and may be set without ec_transfer_config",
    ),
    _feature(
        name="features.refuted",
        target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        make="vllm_mmcache.components.features.engine.hooks:name_refuted",
        args_used=(),
        why="the API server must forget a record that is not of its image, or the next request fails as well",
        process="engine",
        upstream="none: a connector can't fail a request, nor name the items whose cache entries are wrong",
        remove_when="a connector can say which items of a request are wrong",
    ),
    _feature(
        name="features.watch",
        target="vllm.model_executor.model_loader.base_loader:BaseModelLoader.create_model",
        make="vllm_mmcache.components.features.worker.hooks:watch_weights",
        args_used=(),
        why="vLLM's CPU kernels pack weights away, so those of the tower are known only while they are loaded",
    ),
    _feature(
        name="features.runs",
        target="vllm.v1.worker.gpu_model_runner:group_and_batch_mm_kwargs",
        also=("vllm.v1.worker.gpu.mm.encoder_runner:group_and_batch_mm_kwargs",),
        make="vllm_mmcache.components.features.worker.hooks:count_runs",
        args_used=("mm_kwargs",),
        why="runs of the tower are counted and timed, and image by image where asked, for every model class alike",
        upstream="none: enable_mm_processor_stats times requests, and waits for the device to do so",
        remove_when="vLLM counts the images that its encoder ran for",
    ),
    _feature(
        name="features.encode_v1",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._execute_mm_encoder",
        make="vllm_mmcache.components.features.worker.hooks:encode_v1",
        args_used=("scheduler_output",),
        why="runner V1 has no connector of its own; an image whose features are there needs no run of the tower",
        only="runner V1",
        upstream="none: vLLM calls V1 deprecated",
        remove_when="vLLM drops model runner V1",
    ),
    _feature(
        name="features.reset",
        target="vllm.v1.worker.gpu_worker:Worker.reset_encoder_cache",
        make="vllm_mmcache.components.features.worker.hooks:expect_new_weights",
        args_used=(),
        why="vLLM calls it when weights were replaced in place: features of the old weights must not be used",
    ),
    _feature(
        name="features.update",
        target="vllm.v1.worker.gpu_worker:Worker.update_weights",
        make="vllm_mmcache.components.features.worker.hooks:expect_new_weights",
        args_used=(),
        why="weight transfer can write into parameters without the model's load_weights",
    ),
    _feature(
        name="features.updated",
        target="vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
        make="vllm_mmcache.components.features.worker.hooks:expect_new_weights",
        args_used=(),
        why="the end of a weight transfer processes what was received",
    ),
    _feature(
        name="features.reload",
        target="vllm.v1.worker.gpu_worker:Worker.reload_weights",
        make="vllm_mmcache.components.features.worker.hooks:expect_new_weights",
        args_used=(),
        why="what is loaded is processed after load_weights, and is known when that is done",
    ),
    _feature(
        name="features.sleep",
        target="vllm.v1.worker.gpu_worker:Worker.sleep",
        make="vllm_mmcache.components.features.worker.hooks:pause_while_asleep",
        args_used=(),
        why="vLLM takes the weights' memory away, which a thread may be reading to know them",
        upstream="none",
        remove_when="weights are known without being read",
    ),
    _feature(
        name="features.wake",
        target="vllm.v1.worker.gpu_worker:Worker.wake_up",
        make="vllm_mmcache.components.features.worker.hooks:go_on_awake",
        args_used=(),
        why="weights are there again, perhaps others",
        upstream="none",
        remove_when="weights are known without being read",
    ),
)
