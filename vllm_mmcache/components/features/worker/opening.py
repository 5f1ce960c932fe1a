# SPDX-License-Identifier: Apache-2.0
"""Opens a rank's part of the feature store when its model is loaded, or says why there can be none. Worker process."""

import logging
import time
import weakref
from collections.abc import Collection
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
from vllm_mmcache.components.features.worker.vllm_probe import (
    FeatureFormat,
    TrialInputs,
    Unsupported,
    probe,
    takes,
    trial_inputs,
)
from vllm_mmcache.components.lazy_processing.positions import guard_positions
from vllm_mmcache.components.lazy_processing.vllm_pixels import PixelMaker
from vllm_mmcache.components.lazy_processing.vllm_processor_facts import video_facts
from vllm_mmcache.models.vllm_registry import said_by

logger = logging.getLogger("vllm.mmcache")

RANK_FEATURES = "_mmcache_features"
"""The attribute of a model runner that holds its RankFeatures."""

_TRIAL = "_mmcache_trial"
"""The attribute that holds what its tower is to be tried with, by modality, from `look_at` to the trial."""

_maker: PixelMaker | None = None


def look_at(worker: Any) -> dict[str, Any]:
    """Make what this worker's tower is to be tried with, or say why it can have no store; its tower does not run yet.

    Returns what all ranks must have alike before they try their towers together: the digest of the inputs by modality,
    empty for videos where there are none. Nothing of a rank that has no images to encode, or whose store is open.
    """
    if rank_features_of(worker) is not None:
        return {}
    try:
        tower = _tower_of(worker)
        if not place_of(worker.vllm_config).encodes:
            return {}
        if tower.hidden_weights() and not tower.loaded:
            raise Unsupported(f"load format {worker.vllm_config.load_config.load_format} does not show vision weights")
        if not hasattr(worker.model_runner, _TRIAL):
            setattr(worker.model_runner, _TRIAL, _inputs(worker.vllm_config, worker.model_runner.get_model()))
    except Unsupported as reason:
        _say_off(reason)
        return {}
    made: dict[str, TrialInputs] = getattr(worker.model_runner, _TRIAL)
    return {modality: made[modality].digest() if modality in made else "" for modality in ("image", "video")}


def _inputs(vllm_config: Any, model: Any) -> dict[str, TrialInputs]:
    """By modality; without videos where these can't be tried. Raises: Unsupported."""
    try:
        made = {"image": trial_inputs(vllm_config, model, "image")}
    except Unsupported:
        raise
    except Exception as error:  # a model's own code
        logger.debug("mmcache could not make images to try the vision tower with", exc_info=True)
        raise Unsupported(f"{type(model).__name__} could not be tried with two images: {error}") from error
    try:
        if takes(vllm_config, "video"):
            made["video"] = trial_inputs(vllm_config, model, "video")
    except Unsupported as reason:
        logger.info("mmcache: no features of videos are kept: %s", reason)
    except Exception as error:  # a model's own code
        logger.debug("mmcache could not make videos to try the vision tower with", exc_info=True)
        logger.info("mmcache: no features of videos are kept: two could not be tried: %s", error)
    return made


def open_on_rank(worker: Any, address: str, modalities: Collection[str]) -> dict[str, Any]:
    """Open this rank's part of the arena at `address`, when its model is loaded, or say why not.

    It runs the tower, whose ranks wait for each other: all of them are told to do this, or none, and with the same
    modalities, for which each has the same inputs from `look_at` (lifecycle/rank_sync.py). Returns what the engine
    must know of it; nothing of a rank that has no images to encode.
    """
    try:
        return _open(worker, address, modalities)
    except Unsupported as reason:
        _say_off(reason)
    except Exception as error:  # of an arena or a model that can't be used, which must not keep it from serving
        logger.exception("mmcache could not open the feature store")
        _say_off(Unsupported(f"the store could not be opened: {error}"))
    close_on_rank(worker)
    return {}


def _open(worker: Any, address: str, modalities: Collection[str]) -> dict[str, Any]:
    vllm_config, runner, tower = worker.vllm_config, worker.model_runner, _tower_of(worker)
    model, place = runner.get_model(), place_of(vllm_config)
    if not place.encodes:
        return {}
    inputs: dict[str, TrialInputs] = getattr(runner, _TRIAL)
    delattr(runner, _TRIAL)
    start = time.perf_counter()
    # All inputs are tried before anything is refused: a rank that stops after images leaves the others waiting in the
    # run with videos.
    tried = {modality: _tried(vllm_config, model, tower, runner.device, inputs[modality]) for modality in modalities}
    kind = tried["image"]
    if isinstance(kind, Unsupported):
        raise kind
    if (told := said_by(type(model))) is not None:
        package = told.package(vllm_config.model_config.hf_config)
        if kind.width != package.width:
            raise Unsupported(f"features have {kind.width} columns, {type(model).__name__} says {package.width}")
    rank = _rank_features(tower, address, place.row, runner.device)
    setattr(runner, RANK_FEATURES, rank)
    weakref.finalize(runner, rank.close)
    if hasattr(runner, "ec_connector"):  # V2
        runner.ec_connector = Connector(rank, runner.encoder_cache, runner.ec_connector)
    rank.know_weights()
    global _maker
    _maker = PixelMaker(vllm_config.model_config)
    guard_positions(model, vllm_config.model_config)
    logger.info("mmcache: vision tower tried and its weights known in %.0f ms", 1000 * (time.perf_counter() - start))
    facts = {"width": kind.width, "sample": kind.sample, **facts_of(vllm_config, runner.device)}
    return {"row": place.row, **facts, **_of_videos(vllm_config, tried.get("video"), kind)}


def _tried(
    vllm_config: Any, model: Any, tower: Tower, device: torch.device, inputs: TrialInputs
) -> FeatureFormat | Unsupported:
    """What the tower gives for these inputs; an error is returned as the reason why it can't be had."""
    try:
        return probe(vllm_config, model, tower, device, inputs)
    except Unsupported as reason:
        return reason
    except Exception as error:  # a model's own code
        logger.debug("mmcache could not try the vision tower", exc_info=True)
        return Unsupported(f"{type(model).__name__} could not be tried with two {inputs.modality}s: {error}")


def _rank_features(tower: Tower, address: str, row: int, device: torch.device) -> RankFeatures:
    """Raises: Unsupported, with nothing left open."""
    try:
        arena = Arena.open(address)
    except ArenaUnusable as error:
        raise Unsupported(str(error)) from error
    try:
        copies = DeviceCopies(arena, row, device)
    except Unpinnable as error:
        arena.close()
        raise Unsupported(str(error)) from error
    return RankFeatures(tower, copies, arena.board[row : row + 1], is_alone=len(arena.board) == 1)


def close_on_rank(worker: Any) -> None:
    """There is no store on this rank, or none any more: its threads end, and its memory and connector are let go.

    The one way to close a store in a rank, for one that was refused at start as for one that is switched off later,
    also again; engine.hooks.close_store is that of the engine. Between two steps. A rank that was told of steps goes
    on to look at the rows of images that come without their pixels; of another one nothing is left. Model runner's
    thread.
    """
    runner = getattr(worker, "model_runner", None)
    if hasattr(runner, _TRIAL):
        delattr(runner, _TRIAL)
    rank = rank_features_of(worker)
    if runner is None or rank is None:
        return
    rank.close()
    if rank.has_served:
        return
    delattr(runner, RANK_FEATURES)
    if isinstance(connector := getattr(runner, "ec_connector", None), Connector):
        runner.ec_connector = connector.replaced


def _of_videos(vllm_config: Any, videos: FeatureFormat | Unsupported | None, images: FeatureFormat) -> dict[str, str]:
    """What the engine must know to keep features of videos, too; empty texts where they are not kept."""
    if isinstance(videos, FeatureFormat) and videos.width != images.width:
        videos = Unsupported(f"a video's features have {videos.width} columns, an image's {images.width}")
    try:
        if isinstance(videos, FeatureFormat):
            return {"video": video_facts(vllm_config.model_config), "video_sample": videos.sample}
    except Exception as error:  # a model's own code
        logger.debug("mmcache could not tell how a model samples frames", exc_info=True)
        videos = Unsupported(f"how frames are sampled is not known: {error}")
    if videos is not None:
        logger.info("mmcache: no features of videos are kept: %s", videos)
    return {"video": "", "video_sample": ""}


def _tower_of(worker: Any) -> Tower:
    """The tower of the worker's model. Raises: Unsupported, saying why there can be no store for it."""
    if reason := why_not(worker.model_runner):
        raise Unsupported(reason)
    model = worker.model_runner.get_model()
    # vLLM then puts adapters around all layers that they have weights for (LoRAModelManager).
    if worker.vllm_config.lora_config is not None and not hasattr(model, "get_mm_mapping"):
        raise Unsupported(f"LoRA adapters can change the vision tower: {type(model).__name__} has no get_mm_mapping")
    if (tower := watched(model)) is None:
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
