# SPDX-License-Identifier: Apache-2.0
"""A rank takes from the arena what the engine has found, and puts there what its vision tower gave. Worker process.

vLLM's scheduler sends a rank the images to encode, and ours says with it which of them lie in the arena: these go into
vLLM's encoder cache before the tower is asked, which then runs for the others. So nothing depends on a promise: what a
rank does not take is a run of its tower. No model class is named. Never writes into features, never fails a request.
"""

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.v1.worker.gpu.ec_connector import ECConnector

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.errors import ArenaUnusable
from vllm_mmcache.base.estimate import Estimate
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.status import State
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.message import Message, SlotRef
from vllm_mmcache.components.features.vllm_facts import facts_of, place_of, why_not
from vllm_mmcache.components.features.worker.device_copies import DeviceCopies, Unpinnable
from vllm_mmcache.components.features.worker.tower import Tower, watched
from vllm_mmcache.components.features.worker.vllm_probe import FeatureFormat, Unsupported, probe, probe_videos, takes
from vllm_mmcache.components.features.worker.weights import Fingerprints
from vllm_mmcache.components.lazy_processing.positions import guard_positions
from vllm_mmcache.components.lazy_processing.vllm_item import is_deferred
from vllm_mmcache.components.lazy_processing.vllm_pixels import PixelMaker
from vllm_mmcache.components.lazy_processing.vllm_processor_facts import video_facts
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters

logger = logging.getLogger("vllm.mmcache")

_SIDE = "_mmcache_features"
_KNOWN_WITHIN_S = 600.0  # the fingerprint of weights that were just loaded

Outputs = dict[str, torch.Tensor]
"""vLLM's encoder cache: name -> features, on the device."""
Seconds = Callable[[], float]

_encoding: "RankFeatures | None" = None  # whose step this process is in
_maker: PixelMaker | None = None  # of pixels, for the model of this process


hook = Hooks(
    "features",
    "worker",
    upstream="none: a connector is handed neither the model nor the inputs of an item",
    remove_when="vLLM tells a connector of loaded and changed weights",
)


class RankFeatures:
    """One rank's part of the store; `row` is its own of the arena's board. One thread, the model runner's."""

    def __init__(self, tower: Tower, copies: DeviceCopies, row: Any, is_alone: bool = True) -> None:
        self.tower = tower
        self.copies = copies
        self.weights = Fingerprints(tower, self._say_fingerprint)
        self._row = row
        self._is_alone = is_alone
        self._estimate = Estimate(row["tower_s"][0])
        self._runs: list[Seconds] = []  # of the tower in this step
        self._is_serving = False
        self.is_spoiled = False
        """Whether the tower was shown something in this step that was not as it was recorded."""

    def know_weights(self) -> None:
        """Have their fingerprint taken anew: at start before anything else goes on, later in the background.

        vLLM captures CUDA graphs at start, in which no other thread may use the device.
        """
        self.weights.look()
        if not self._is_serving:
            self.weights.wait(_KNOWN_WITHIN_S)

    @contextlib.contextmanager
    def encoding(self, message: Message | None, outputs: Outputs) -> Iterator[set[str]]:
        """Around a step's encoding: what the engine has found is in `outputs` before it, what is new is saved after.

        Yields the names that need no run of the tower. Shapes: outputs (num_tokens, width) each, on the device.
        Raises: what the block raises; with several ranks also what goes wrong before it, since none may go its own way.
        """
        global _encoding
        taken: set[str] = set()
        kept: list[SlotRef] = []
        # Where ranks wait for each other, one that went its own way would stop them all: there it raises.
        with failsafe("features") if self._is_alone else contextlib.nullcontext():
            kept, taken = self._begin(message, outputs)
        before = set(outputs)
        self._runs = []
        self.is_spoiled = False
        _encoding = self
        try:
            yield taken
        finally:
            _encoding = None
        with failsafe("features") if self._is_alone else contextlib.nullcontext():
            self._fit(message, outputs)
        with failsafe("features"):
            if self._runs:
                self._measure([len(features) for name, features in outputs.items() if name not in before])
            for place in kept:
                self._save(place, None if self.is_spoiled else outputs.get(place.mm_hash))

    def ran(self, seconds: Seconds) -> None:
        """The tower ran; `seconds` waits for its end and says how many it took, and is asked in another thread."""
        self._runs.append(seconds)

    def close(self) -> None:
        """What was to be copied is copied; nothing is taken or saved afterwards."""
        self.weights.close()
        self.copies.close()

    def _begin(self, message: Message | None, outputs: Outputs) -> tuple[list[SlotRef], set[str]]:
        """What is to be saved afterwards, and the names of what was taken."""
        self.weights.look()
        if message is None:
            return [], set()
        self._is_serving = True
        if message.generation != self._known_generation():
            self._decline(message)
            return [], set()
        return message.saves, self._take(message.loads, outputs)

    def _fit(self, message: Message | None, outputs: Outputs) -> None:
        """The features of images that came without their pixels have as many rows as their prompts have room for.

        Others are of a record that is not the image's own, and would end the step. Shapes: (num_tokens, width).
        """
        for name, num_rows in message.rows.items() if message is not None else ():
            features = outputs.get(name)
            if features is not None and len(features) != num_rows:
                logger.error("mmcache: an image has %d features, not the %d of its record", len(features), num_rows)
                outputs[name] = features.new_zeros((num_rows, *features.shape[1:]))
                self.is_spoiled = True

    def _take(self, places: list[SlotRef], outputs: Outputs) -> set[str]:
        for place, features in zip(places, self.copies.load(places), strict=True):
            outputs[place.mm_hash] = features
        counters.TOWER_IMAGES_AVOIDED.add(len(places))
        return {place.mm_hash for place in places}

    def _save(self, place: SlotRef, features: torch.Tensor | None) -> None:
        shape = place.shape
        if features is not None:
            counters.TOWER_TOKENS.add(len(features))
            if (
                tuple(features.shape) != (shape.num_tokens, shape.width)
                or str(features.dtype) != f"torch.{shape.dtype}"
            ):
                seen = f"{tuple(features.shape)} {features.dtype}"
                logger.warning("mmcache does not keep what the vision tower gave for an image: %s, not %s", seen, shape)
                features = None
        self.copies.save(place, features)

    def _decline(self, message: Message) -> None:
        """Of other weights than these: the tower runs for all, and nothing of it is kept."""
        self.copies.skip(message.loads)
        for place in message.saves:
            self.copies.save(place, None)

    def _measure(self, rows: list[int]) -> None:
        runs = self._runs

        def measure() -> None:
            seconds = sum(run() for run in runs)
            counters.TOWER_SECONDS.add(seconds)
            if rows:
                self._estimate.add(sum(rows) // len(rows), seconds / len(rows))

        self.copies.then(measure)

    def _known_generation(self) -> int:
        """Of the weights, as the board has it: counted from 1, and 0 while their fingerprint is not known."""
        return self.weights.generation + 1 if self.weights.fingerprint else 0

    def _say_fingerprint(self, generation: int, digest: str) -> None:
        self._row["generation"] = 0
        if digest:
            self._row["fingerprint"] = digest.encode()
            self._row["generation"] = generation + 1


class Connector(ECConnector):  # type: ignore[misc]
    """The side as runner V2's encoder-cache connector, which vLLM asks around each step's encoding."""

    def __init__(self, side: RankFeatures, outputs: Outputs) -> None:
        self._side = side
        self._outputs = outputs

    @contextlib.contextmanager
    def maybe_get_output(self, scheduler_output: Any) -> Iterator[None]:
        """Around a step's encoding, as in vLLM's; what the step's output says of the transfer is always None."""
        with self._side.encoding(_message_of(scheduler_output), self._outputs):
            yield None


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
    side: RankFeatures | None = getattr(instance, _SIDE, None)
    if side is None:
        return wrapped(*args, **kwargs)
    scheduler_output = argument(wrapped, args, kwargs, "scheduler_output")
    with side.encoding(_message_of(scheduler_output), instance.encoder_cache) as taken:
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

    With the setting tower_one_by_one each item is a batch, so that features don't depend on what else was there. A
    batch ends when the runner asks for the next one.
    """
    items = argument(wrapped, args, kwargs, "mm_kwargs")
    if _maker is not None and any(is_deferred(item) for _, item in items):
        # Features went away between, as seldom happens: what they would have saved is done now.
        completed = [(modality, *_maker.complete(item)) for modality, item in items]
        items = [(modality, item) for modality, item, _ in completed]
        if _encoding is not None and not all(is_as_recorded for *_, is_as_recorded in completed):
            _encoding.is_spoiled = True
    more = {name: value for name, value in kwargs.items() if name != "mm_kwargs"}
    parts = [[item] for item in items] if settings.current().tower_one_by_one else [items]
    for part in parts:
        for batch in wrapped(part, *args[1:], **more):
            modality, num_items, _ = batch
            if modality not in ("image", "video"):
                yield batch
                continue
            timed = _timed(_encoding is not None and _encoding.copies.is_asynchronous)
            yield batch
            counters.TOWER_IMAGES.add(num_items)
            if _encoding is not None:
                _encoding.ran(timed())
            else:
                counters.TOWER_SECONDS.add(timed()())


@hook(
    "vllm.v1.worker.gpu_worker:Worker.reset_encoder_cache",
    name="reset",
    why="vLLM calls it when weights were replaced in place: features of the old weights must not be used",
)
@hook(
    "vllm.v1.worker.gpu_worker:Worker.update_weights",
    name="update",
    why="weight transfer can write into parameters without the model's load_weights",
)
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
def expect_new_weights(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of what vLLM calls when weights may have changed, or will: features of the old ones are not used."""
    side = _side_of(instance)
    if side is None:
        return wrapped(*args, **kwargs)
    with side.weights.changing():
        outcome = wrapped(*args, **kwargs)
    side.know_weights()
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
    side = _side_of(instance)
    if side is None:
        return wrapped(*args, **kwargs)
    side.weights.pause()
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        side.weights.resume()  # they are still there
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
    if (side := _side_of(instance)) is not None and (tags is None or "weights" in tags):
        side.weights.resume()
        side.weights.look()
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


def look_at(worker: Any) -> None:
    """Say why this worker can have no store, as far as it is known without a run of the tower."""
    try:
        _tower_of(worker)
    except Unsupported as reason:
        _say_off(reason)


def open_on_rank(worker: Any, address: str) -> dict[str, Any]:
    """Open this rank's side of the arena at `address`, when its model is loaded, or say why not.

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
    side = RankFeatures(tower, copies, arena.board[place.row : place.row + 1], is_alone=len(arena.board) == 1)
    side.know_weights()
    global _maker
    _maker = PixelMaker(vllm_config.model_config)
    guard_positions(model, vllm_config.model_config)
    setattr(runner, _SIDE, side)
    if hasattr(runner, "ec_connector"):  # V2
        runner.ec_connector = Connector(side, runner.encoder_cache.encoder_outputs)
    weakref.finalize(runner, side.close)
    logger.info("mmcache: vision tower tried and its weights known in %.0f ms", 1000 * (time.perf_counter() - start))
    facts = {"width": kind.width, "sample": kind.sample, **facts_of(vllm_config, runner.device)}
    return {"row": place.row, **facts, **_of_videos(vllm_config, model, tower, runner.device, kind)}


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


def _side_of(instance: Any) -> RankFeatures | None:
    """Of a model runner, or of the worker that has it."""
    found: RankFeatures | None = getattr(instance, _SIDE, None) or getattr(
        getattr(instance, "model_runner", None), _SIDE, None
    )
    return found


def _message_of(scheduler_output: Any) -> Message | None:
    found = scheduler_output.ec_connector_metadata
    return found if isinstance(found, Message) else None


def _timed(is_asynchronous: bool) -> Callable[[], Seconds]:
    """Call at the start; what it gives, at the end; what that gives says how long the device took, and waits for it."""
    if not is_asynchronous:
        start = time.perf_counter()

        def end() -> Seconds:
            seconds = time.perf_counter() - start
            return lambda: seconds

        return end
    begun = torch.cuda.Event(enable_timing=True)
    begun.record()

    def end_on_device() -> Seconds:
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        return lambda: (ended.synchronize(), begun.elapsed_time(ended) / 1000)[1]

    return end_on_device
