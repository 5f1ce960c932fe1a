# SPDX-License-Identifier: Apache-2.0
"""The worker asks the feature store before it runs the vision tower, and saves what the tower gave. Worker process.

vLLM's scheduler sends a worker the images to encode; those whose features the store loads go straight into vLLM's
encoder cache and are taken off the list, the rest goes to the tower. So nothing depends on a promise: a package that
is gone, corrupt or of another image is a run of the tower. Wraps two methods of the model runner, in its thread, and
what loads or updates weights. Never writes into features, and never fails a request.
"""

import inspect
import logging
import time
import weakref
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_mmcache import settings
from vllm_mmcache.features.room import Item, Room
from vllm_mmcache.features.store import open_store
from vllm_mmcache.features.vllm_facts import facts_of, layout, why_not

logger = logging.getLogger("vllm.mmcache")

_ROOM = "_mmcache_features"
_CACHE = inspect.signature(GPUModelRunner._cache_encoder_output)
_rooms: "weakref.WeakSet[Room]" = weakref.WeakSet()


def open_after_load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Worker.load_model: opens the store and takes the fingerprint of the weights."""
    outcome = wrapped(*args, **kwargs)
    runner = instance.model_runner
    reason = why_not(instance.vllm_config, runner)
    if reason:
        logger.info("mmcache: no feature store: %s", reason)
        return outcome
    in_force = settings.current()
    room = Room(runner.get_model(), open_store(in_force), facts_of(instance.vllm_config), layout())
    start = time.perf_counter()
    room.fingerprint()
    logger.info(
        "mmcache: features are kept in RAM (%s)%s; fingerprint of the vision weights in %.0f ms",
        in_force.feature_ram_bytes.human_readable(),
        f" and in {settings.without_secrets(in_force.store)}" if in_force.store else "",
        1000 * (time.perf_counter() - start),
    )
    setattr(runner, _ROOM, room)
    _rooms.add(room)
    # Where nobody shuts the worker down: what is saved is written before the process ends.
    weakref.finalize(runner, room.store.close)
    return outcome


def take_known(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of GPUModelRunner._batch_mm_inputs_from_scheduler: leaves out the images whose features are stored."""
    batch = wrapped(*args, **kwargs)
    room: Room | None = getattr(instance, _ROOM, None)
    if room is None:
        return batch
    if settings.current().features is False:
        room.expect([])
        return batch
    hashes, inputs, places = batch
    items = [
        Item(mm_hash, dict(data.get_data()), place.get_num_embeds()) if modality == "image" else None
        for mm_hash, (modality, data), (_, place) in zip(hashes, inputs, places, strict=True)
    ]
    found = room.take(items)
    for mm_hash, features in zip(hashes, found, strict=True):
        if features is not None:
            instance.encoder_cache[mm_hash] = features.to(instance.device)
    left = [index for index, features in enumerate(found) if features is None]
    return [hashes[i] for i in left], [inputs[i] for i in left], [places[i] for i in left]


def save_new(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of GPUModelRunner._cache_encoder_output: saves what the tower gave for an image that was not stored."""
    outcome = wrapped(*args, **kwargs)
    room: Room | None = getattr(instance, _ROOM, None)
    if room is not None:
        given = _CACHE.bind(instance, *args, **kwargs).arguments
        room.save(given["mm_hash"], given["output"])
    return outcome


def doubt_weights(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of what vLLM calls when weights may have changed: the fingerprint is taken anew before its next use."""
    runner = instance if isinstance(instance, GPUModelRunner) else getattr(instance, "model_runner", None)
    room: Room | None = getattr(runner, _ROOM, None)
    if room is not None:
        room.doubt()
    return wrapped(*args, **kwargs)


def close_at_shutdown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Worker.shutdown: what is saved is written first, within a few seconds."""
    room: Room | None = getattr(getattr(instance, "model_runner", None), _ROOM, None)
    if room is not None:
        room.store.close()
    return wrapped(*args, **kwargs)


def counts() -> dict[str, dict[str, float]]:
    """The counts of each tier, by its name, over all stores of this process; see `counters.Counts`."""
    total: dict[str, dict[str, float]] = {}
    for room in _rooms:
        for tier, amounts in room.store.counts().items():
            into = total.setdefault(tier, {})
            for name, amount in amounts.items():
                into[name] = into.get(name, 0) + amount
    return total


def flush(timeout_s: float) -> bool:
    """Wait until all that was saved in this process is written or given up. Returns False after `timeout_s`."""
    return all(room.store.flush(timeout_s) for room in _rooms)
