# SPDX-License-Identifier: Apache-2.0
"""A rank takes from the arena what the engine has found, and puts there what its vision tower gave. Worker process.

vLLM's scheduler sends a rank the images to encode, and ours says with it which of them lie in the arena: these go into
vLLM's encoder cache before the tower is asked, which then runs for the others. So nothing depends on a promise: what a
rank does not take is a run of its tower. Any model class will do. Never writes into features, never fails a request.
"""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from vllm_mmcache.base import settings
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.components.features.worker.opening import RANK_FEATURES, pixel_maker, rank_features_of
from vllm_mmcache.components.features.worker.rank import RankFeatures, current, timer
from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.components.features.worker.vllm_connector import message_of, put_pixels
from vllm_mmcache.components.lazy_processing.vllm_item import is_deferred
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters

logger = logging.getLogger("vllm.mmcache")

hook = Hooks(
    "features",
    "worker",
    upstream="none: a connector is handed neither the model nor the inputs of an item",
    remove_when="vLLM tells a connector of loaded and changed weights",
)


@hook(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._execute_mm_encoder",
    name="encode_v1",
    args=("scheduler_output",),
    only="runner V1",
    why="runner V1 has no connector of its own; an image whose features are there needs no run of the tower",
    upstream="none: vLLM calls V1 deprecated",
    remove_when="vLLM drops model runner V1",
)
def encode_v1(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of GPUModelRunner._execute_mm_encoder, of runner V1: what was taken is left out of what it encodes."""
    rank: RankFeatures | None = getattr(instance, RANK_FEATURES, None)
    if rank is None:
        return wrapped(*args, **kwargs)
    scheduler_output = argument(wrapped, args, kwargs, "scheduler_output")
    message = message_of(scheduler_output)
    put_pixels(message, scheduler_output, lambda request_id: instance.requests[request_id].mm_features)
    with rank.encoding(message, instance.encoder_cache) as taken:
        if taken:
            left = {
                request_id: [i for i in images if instance.requests[request_id].mm_features[i].identifier not in taken]
                for request_id, images in scheduler_output.scheduled_encoder_inputs.items()
            }
            left = {request_id: images for request_id, images in left.items() if images}
            scheduler_output = dataclasses.replace(scheduler_output, scheduled_encoder_inputs=left)
        return wrapped(scheduler_output)


@hook(
    "vllm.v1.worker.gpu_model_runner:group_and_batch_mm_kwargs",
    name="runs",
    args=("mm_kwargs",),
    also=("vllm.v1.worker.gpu.mm.encoder_runner:group_and_batch_mm_kwargs",),
    why="runs of the tower are counted and timed, and image by image where asked, for every model class alike",
    upstream="none: enable_mm_processor_stats times requests, and waits for the device to do so",
    remove_when="vLLM counts the images that its encoder ran for",
)
def count_runs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Wrapper of group_and_batch_mm_kwargs as the model runners see it: a batch of images or videos is a run.

    With the setting tower_one_by_one each item of a step is a batch, so that features don't depend on what else was
    there. Outside of steps, as when vLLM looks how much memory a full batch takes, and on ranks that keep no features,
    batches are vLLM's. A batch ends when the runner asks for the next one.
    """
    items = argument(wrapped, args, kwargs, "mm_kwargs")
    maker, encoding = pixel_maker(), current()
    if maker is not None and any(is_deferred(item) for _, item in items):
        # Features went away between, as seldom happens: what they would have saved is done now.
        completed = [(modality, *maker.complete(item)) for modality, item in items]
        items = [(modality, item) for modality, item, _ in completed]
        if encoding is not None and not all(is_as_recorded for *_, is_as_recorded in completed):
            encoding.is_spoiled = True
    more = {name: value for name, value in kwargs.items() if name != "mm_kwargs"}
    splits = encoding is not None and settings.current().tower_one_by_one
    parts = [[item] for item in items] if splits else [items]
    for part in parts:
        for batch in wrapped(part, *args[1:], **more):
            modality, num_items, _ = batch
            if modality not in ("image", "video"):
                yield batch
                continue
            timed = timer(encoding is not None and encoding.copies.is_asynchronous)
            yield batch
            counters.TOWER_IMAGES.add(num_items)
            if encoding is not None:
                encoding.ran(timed())
            else:
                counters.TOWER_SECONDS.add(timed()())


@hook(
    "vllm.v1.worker.gpu_worker:Worker.start_weight_update",
    name="update",
    why="weights are transferred in parts, between which the tower is of neither the old nor the new ones",
)
def begin_update(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Worker.start_weight_update: from here to the end of the update nothing is taken, kept or read.

    Where a part of it fails, the tower may be half written, and this lasts to the end of the next one, or to a reload.
    """
    rank = rank_features_of(instance)
    if rank is None:
        return wrapped(*args, **kwargs)
    rank.weights.begin_update()
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        if not getattr(instance, "_weight_update_active", False):  # else it is refused since one is going on
            rank.weights.end_update()
        raise


@hook(
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
    name="updated",
    why="the end of a weight transfer processes what was received",
)
@hook(
    "vllm.v1.worker.gpu_worker:Worker.reload_weights",
    name="reload",
    why="what is loaded is processed after load_weights, and is known when that is done",
)
def end_update(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of what leaves all weights whole: the end of an update in parts, or a load of all of them."""
    outcome = expect_new_weights(wrapped, instance, args, kwargs)
    if (rank := rank_features_of(instance)) is not None:
        rank.weights.end_update()
        rank.know_weights()
    return outcome


@hook(
    "vllm.v1.worker.gpu_worker:Worker.reset_weights",
    name="zero",
    why="vLLM's weight checker sets all weights to zero: what the tower gives then is not of the former ones",
    upstream="none",
    remove_when="a connector is told of changed weights",
)
@hook(
    "vllm.v1.worker.gpu_worker:Worker.reset_encoder_cache",
    name="reset",
    why="vLLM calls it when weights were replaced in place: features of the old weights must not be used",
)
def expect_new_weights(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of what vLLM calls when weights may have changed, or will: features of the old ones are not used."""
    rank = rank_features_of(instance)
    if rank is None:
        return wrapped(*args, **kwargs)
    with rank.weights.changing():
        outcome = wrapped(*args, **kwargs)
    rank.know_weights()
    return outcome


@hook(
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    name="sleep",
    why="vLLM takes the weights' memory away, which a thread may be reading to know them",
    upstream="none",
    remove_when="weights are known without being read",
)
def pause_on_sleep(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Worker.sleep: vLLM takes the weights' memory away, so nobody may be reading it."""
    rank = rank_features_of(instance)
    if rank is None:
        return wrapped(*args, **kwargs)
    rank.weights.pause()
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        rank.weights.resume()  # they are still there
        raise


@hook(
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
    name="wake",
    why="weights are there again, perhaps others",
    upstream="none",
    remove_when="weights are known without being read",
)
def resume_on_wake_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Worker.wake_up: weights are there again, perhaps others."""
    outcome = wrapped(*args, **kwargs)
    tags = argument(wrapped, args, kwargs, "tags")
    if (rank := rank_features_of(instance)) is not None and (tags is None or "weights" in tags):
        rank.weights.resume()
        rank.weights.look()
    return outcome


@hook(
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.create_model",
    name="watch",
    why="vLLM's CPU kernels pack weights away, so those of the tower are known only while they are loaded",
)
def watch_weights(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseModelLoader.create_model: what a multimodal model loads into its tower is noted from the start."""
    from vllm.model_executor.models.interfaces import supports_multimodal
    from vllm.platforms import current_platform

    model = wrapped(*args, **kwargs)
    if supports_multimodal(model) and hasattr(model, "load_weights"):
        try:
            Tower(model).watch(notes=current_platform.is_cpu())  # the one that packs weights away
        except LookupError as error:
            logger.debug("mmcache: weights are not watched: %s", error)
    return model
