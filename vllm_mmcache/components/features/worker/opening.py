# SPDX-License-Identifier: Apache-2.0
"""Opens a rank's part of the feature store when its model is loaded, or says why there can be none. Worker process."""

import logging
import time
import weakref
from typing import Any

import torch

from vllm_mmcache.base import status
from vllm_mmcache.base.errors import ArenaUnusable
from vllm_mmcache.base.status import State
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.vllm_facts import facts_of, place_of, why_not
from vllm_mmcache.components.features.worker.device_copies import DeviceCopies, Unpinnable
from vllm_mmcache.components.features.worker.rank import RankFeatures
from vllm_mmcache.components.features.worker.tower import Tower, watched
from vllm_mmcache.components.features.worker.vllm_connector import Connector
from vllm_mmcache.components.features.worker.vllm_probe import FeatureFormat, Unsupported, probe, probe_videos, takes
from vllm_mmcache.components.lazy_processing.positions import guard_positions
from vllm_mmcache.components.lazy_processing.vllm_pixels import PixelMaker
from vllm_mmcache.components.lazy_processing.vllm_processor_facts import video_facts

logger = logging.getLogger("vllm.mmcache")

RANK_FEATURES = "_mmcache_features"
"""The attribute of a model runner that holds its RankFeatures."""

_maker: PixelMaker | None = None


def look_at(worker: Any) -> None:
    """Say why this worker can have no store, as far as it is known without a run of the tower."""
    try:
        _tower_of(worker)
    except Unsupported as reason:
        _say_off(reason)


def open_on_rank(worker: Any, address: str) -> dict[str, Any]:
    """Open this rank's part of the arena at `address`, when its model is loaded, or say why not.

    It runs the tower, whose ranks wait for each other: all of them are told to do this, or none
    (lifecycle/rank_sync.py). Returns what the engine must know of it; nothing of a rank that has no images to encode.
    """
    try:
        return _open(worker, address)
    except Unsupported as reason:
        _say_off(reason)
    except Exception as error:  # of an arena or a model that can't be used, which must not keep it from serving
        logger.exception("mmcache could not open the feature store")
        _say_off(Unsupported(f"the store could not be opened: {error}"))
    return {}


def _open(worker: Any, address: str) -> dict[str, Any]:
    vllm_config, runner, tower = worker.vllm_config, worker.model_runner, _tower_of(worker)
    model, place = runner.get_model(), place_of(vllm_config)
    if not place.encodes:
        return {}
    start = time.perf_counter()
    try:
        kind = probe(vllm_config, model, tower, runner.device)
    except Unsupported:
        raise
    except Exception as error:  # a model's own code
        logger.debug("mmcache could not try the vision tower", exc_info=True)
        raise Unsupported(f"{type(model).__name__} could not be tried with two images: {error}") from error
    if tower.hidden_weights() and not tower.loaded:
        raise Unsupported(f"load format {vllm_config.load_config.load_format} does not show the vision weights")
    try:
        arena = Arena.open(address)
        copies = DeviceCopies(arena, place.row, runner.device)
    except (ArenaUnusable, Unpinnable) as error:
        raise Unsupported(str(error)) from error
    rank = RankFeatures(tower, copies, arena.board[place.row : place.row + 1], is_alone=len(arena.board) == 1)
    rank.know_weights()
    global _maker
    _maker = PixelMaker(vllm_config.model_config)
    guard_positions(model, vllm_config.model_config)
    setattr(runner, RANK_FEATURES, rank)
    if hasattr(runner, "ec_connector"):  # V2
        runner.ec_connector = Connector(rank, runner.encoder_cache)
    weakref.finalize(runner, rank.close)
    logger.info("mmcache: vision tower tried and its weights known in %.0f ms", 1000 * (time.perf_counter() - start))
    facts = {"width": kind.width, "sample": kind.sample, **facts_of(vllm_config, runner.device)}
    return {"row": place.row, **facts, **_of_videos(vllm_config, model, tower, runner.device, kind)}


def stop_keeping(worker: Any) -> None:
    """Features are switched off: nothing is taken or kept any more. What is being copied is copied first."""
    rank = rank_features_of(worker)
    if rank is not None:
        rank.stop_keeping()


def _of_videos(
    vllm_config: Any, model: Any, tower: Tower, device: torch.device, images: FeatureFormat
) -> dict[str, str]:
    """What the engine must know to keep features of videos, too; empty texts where they are not kept."""
    try:
        if takes(vllm_config, "video"):
            sample = probe_videos(vllm_config, model, tower, device, images).sample
            return {"video": video_facts(vllm_config.model_config), "video_sample": sample}
    except Unsupported as reason:
        logger.info("mmcache: no features of videos are kept: %s", reason)
    except Exception as error:  # a model's own code
        logger.debug("mmcache could not try the vision tower with videos", exc_info=True)
        logger.info("mmcache: no features of videos are kept: two could not be tried: %s", error)
    return {"video": "", "video_sample": ""}


def _tower_of(worker: Any) -> Tower:
    """The tower of the worker's model. Raises: Unsupported, saying why there can be no store for it."""
    if reason := why_not(worker.model_runner):
        raise Unsupported(reason)
    tower = watched(worker.model_runner.get_model())
    if tower is None:
        raise Unsupported(f"load format {worker.vllm_config.load_config.load_format} makes models in a way of its own")
    return tower


def _say_off(reason: Unsupported) -> None:
    logger.info("mmcache: no feature store: %s", reason)
    status.put("worker", "features", State("off", str(reason)))


def rank_features_of(instance: Any) -> RankFeatures | None:
    """Of a model runner, or of the worker that has it."""
    found: RankFeatures | None = getattr(instance, RANK_FEATURES, None) or getattr(
        getattr(instance, "model_runner", None), RANK_FEATURES, None
    )
    return found


def pixel_maker() -> PixelMaker | None:
    """What makes the pixels of items that came without, for the model of this process; None where nothing is opened."""
    return _maker
