# SPDX-License-Identifier: Apache-2.0
"""The worker asks the feature store before it runs the vision tower, and saves what the tower gave. Worker process.

vLLM's scheduler sends a worker the images to encode; those whose features the store loads go straight into vLLM's
encoder cache and are taken off the list, the rest goes to the tower. So nothing depends on a promise: a package that
is gone, corrupt or of another image is a run of the tower. Wraps where the model runner gets and keeps outputs, in its
thread, and what makes, loads or updates a model; no model class is named. Never writes into features, and never fails
a request.
"""

import inspect
import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_mmcache import events, rooms, settings
from vllm_mmcache.features.probe import Unfit, probe
from vllm_mmcache.features.room import Item, Room
from vllm_mmcache.features.store import open_store
from vllm_mmcache.features.tower import Tower, watched
from vllm_mmcache.features.vllm_facts import facts_of, layout, why_not
from vllm_mmcache.rooms import State

logger = logging.getLogger("vllm.mmcache")

_ROOM = "_mmcache_features"
_CACHE = inspect.signature(GPUModelRunner._cache_encoder_output)
_rooms: "weakref.WeakSet[Room]" = weakref.WeakSet()


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


def look_at(worker: Any) -> None:
    """Say why this worker can have no store, as far as it is known without a run of the tower."""
    try:
        _tower_of(worker)
    except Unfit as reason:
        _say_off(reason)


def open_in(worker: Any) -> None:
    """Open the store of a worker whose model is loaded, and take the fingerprint of its weights; or say why not.

    It runs the tower, whose ranks wait for each other: all of them are told to do this, or none (upstream/agree.py).
    """
    runner = worker.model_runner
    if getattr(runner, _ROOM, None) is not None:
        return
    try:
        room = _open(worker)
    except Unfit as reason:
        _say_off(reason)
        return
    except Exception as error:  # of a store or a model that can't be used, which must not keep the model from serving
        logger.exception("mmcache could not open the feature store")
        _say_off(Unfit(f"the store could not be opened: {error}"))
        return
    for owner in (runner, getattr(runner, "model_state", None)):  # V2 encodes in its model state
        if owner is not None:
            setattr(owner, _ROOM, room)
    _rooms.add(room)
    # Where nobody shuts the worker down: what is saved is written before the process ends.
    weakref.finalize(runner, room.store.close)


def _say_off(reason: Unfit) -> None:
    logger.info("mmcache: no feature store: %s", reason)
    rooms.put("worker", "features", State("off", str(reason)))


def _tower_of(worker: Any) -> Tower:
    """The tower of the worker's model. Raises: Unfit, saying why there can be no store for it."""
    if reason := why_not(worker.model_runner):
        raise Unfit(reason)
    tower = watched(worker.model_runner.get_model())
    if tower is None:
        raise Unfit(f"load format {worker.vllm_config.load_config.load_format} makes models in a way of its own")
    return tower


def _open(worker: Any) -> Room:
    """The store of the worker's model. Raises: Unfit, saying why there is none."""
    vllm_config, runner, tower = worker.vllm_config, worker.model_runner, _tower_of(worker)
    model = runner.get_model()
    start = time.perf_counter()
    try:
        kind = probe(vllm_config, model, tower, runner.device)
    except Unfit:
        raise
    except Exception as error:  # a model's own code, which must not keep it from serving
        logger.debug("mmcache could not try the vision tower", exc_info=True)
        raise Unfit(f"{type(model).__name__} could not be tried with two images: {error}") from error
    if tower.hidden_weights() and not tower.loaded:
        raise Unfit(f"load format {vllm_config.load_config.load_format} does not show the vision weights")
    in_force = settings.current()
    room = Room(tower, kind, open_store(in_force), facts_of(vllm_config), layout())
    room.fingerprint()
    logger.info(
        "mmcache: features are kept in RAM (%s)%s; vision tower tried and its weights known in %.0f ms",
        in_force.feature_ram_bytes.human_readable(),
        f" and in {settings.without_secrets(in_force.store)}" if in_force.store else "",
        1000 * (time.perf_counter() - start),
    )
    return room


def count_runs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Wrapper of group_and_batch_mm_kwargs as the model runners see it: each batch of images is a run of the tower.

    With the setting tower_one_by_one each item is a batch, so that features don't depend on what else was there. A
    batch counts when the runner asks for the next one, so the time between is the tower's (its launch, on a GPU).
    """
    items = args[0] if args else kwargs["mm_kwargs"]
    more = {name: value for name, value in kwargs.items() if name != "mm_kwargs"}
    parts = [[item] for item in items] if settings.current().tower_one_by_one else [items]
    for part in parts:
        for batch in wrapped(part, *args[1:], **more):
            modality, num_items, _ = batch
            if modality != "image":
                yield batch
                continue
            for room in _rooms:
                room.spring_trap(num_items)
            start = time.perf_counter()
            yield batch
            events.TOWER_SECONDS.add(time.perf_counter() - start)
            events.TOWER_IMAGES.add(num_items)


def take_known(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of GPUModelRunner._batch_mm_inputs_from_scheduler: leaves out the images whose features are stored."""
    batch = wrapped(*args, **kwargs)
    room: Room | None = getattr(instance, _ROOM, None)
    if room is None:
        return batch
    if not rooms.is_on("features"):
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


def encode_unknown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ModelState.execute_mm_encoder, of runner V2: what is stored is in the encoder cache before it looks.

    It skips images whose outputs are there, so the tower runs for the others alone, and what it gave is saved.
    """
    room: Room | None = getattr(instance, _ROOM, None)
    if room is None or not rooms.is_on("features"):
        if room is not None:
            room.expect([])
        return wrapped(*args, **kwargs)
    scheduled = args[0] if args else kwargs["scheduled_encoder_inputs"]
    outputs = instance.encoder_cache.encoder_outputs
    asked = {}
    for request_id, indices in scheduled.items():
        for feature in (instance.encoder_cache.mm_features[request_id][index] for index in indices):
            if feature.modality == "image" and feature.data is not None and feature.identifier not in outputs:
                data = dict(feature.data.get_data())
                asked[feature.identifier] = Item(feature.identifier, data, feature.mm_position.get_num_embeds())
    for mm_hash, features in zip(asked, room.take(list(asked.values())), strict=True):
        if features is not None:
            outputs[mm_hash] = features.to(instance.encoder_runner.device)
    outcome = wrapped(*args, **kwargs)
    for mm_hash in room.expected():
        room.save(mm_hash, outputs[mm_hash])
    return outcome


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
    room: Room | None = getattr(instance, _ROOM, None) or getattr(getattr(instance, "model_runner", None), _ROOM, None)
    if room is not None:
        room.tower.doubt()
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
