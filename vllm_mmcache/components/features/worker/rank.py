# SPDX-License-Identifier: Apache-2.0
"""One rank's part of the feature store: copies features of a step in and out, and says what its weights are.

Worker process; the model runner's thread.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from vllm_mmcache.base.estimate import Estimate
from vllm_mmcache.base.failsafe import ends_rank, failsafe
from vllm_mmcache.components.features.arena import BOARD
from vllm_mmcache.components.features.message import Message, SlotRef
from vllm_mmcache.components.features.worker.device_copies import DeviceCopies
from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.components.features.worker.weights import Fingerprints
from vllm_mmcache.metrics import counters

logger = logging.getLogger("vllm.mmcache")

_KNOWN_WITHIN_S = 600.0  # the fingerprint of weights that were just loaded

Outputs = dict[str, torch.Tensor]
"""vLLM's encoder cache: name -> features, on the device."""

Seconds = Callable[[], float]

_encoding: "RankFeatures | None" = None


class RankFeatures:
    """One rank's part of the store; `row` is its own of the arena's board. One thread, the model runner's."""

    def __init__(self, tower: Tower, copies: DeviceCopies, row: Any, is_alone: bool = True) -> None:
        self.tower = tower
        self.copies = copies
        self.weights = Fingerprints(tower, self._say_fingerprint)
        self._row = row
        # Ranks wait for each other: one that goes on without the others hangs them all.
        self._guard = failsafe if is_alone else ends_rank
        self._estimate = Estimate(row["tower_s"][0])
        self._runs: list[Seconds] = []  # of the tower in this step
        self._is_serving = False
        self._is_closed = False
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
        """Around a step's encoding: stored features are in `outputs` before it, what `message` asks for is saved after.

        Yields the names that need not be encoded. Shapes: outputs (num_tokens, width) each, on the device.
        Raises: what the block raises; with several ranks also SystemExit, where loading before it or fitting after it
        fails.
        """
        global _encoding
        taken: set[str] = set()
        kept: list[SlotRef] = []
        with self._guard("features"):
            kept, taken = self._begin(message, outputs)
        before = set(outputs)
        self._runs = []
        self.is_spoiled = False
        _encoding = self
        try:
            yield taken
        finally:
            _encoding = None
        with self._guard("features"):
            self._fit(message, outputs)
        with failsafe("features"):
            made = {name: outputs[name] for name in outputs.keys() - before}
            if made:  # most steps only decode
                counters.TOWER_TOKENS.add(sum(map(len, made.values())))
            if self._runs:
                self._measure([len(features) for features in made.values()])
            for place in kept:
                self._save(place, None if self.is_spoiled else made.get(place.mm_hash))

    def ran(self, seconds: Seconds) -> None:
        """The tower ran; `seconds` waits for its end and says how many it took, and is asked in another thread."""
        self._runs.append(seconds)

    @property
    def has_served(self) -> bool:
        """Whether the engine has told it of a step; before that it may go without a trace."""
        return self._is_serving

    def close(self) -> None:
        """What was to be copied is copied; nothing is taken or saved afterwards. Any thread; also again.

        Threads end and the arena is let go. Steps may still come, with images whose rows are looked at as before.
        """
        self._is_closed = True
        self.weights.close()
        self.copies.close()
        self._row["generation"] = 0  # the engine finds nothing that this rank would take
        self._row, self._estimate = np.zeros(1, BOARD), Estimate()

    def _begin(self, message: Message | None, outputs: Outputs) -> tuple[list[SlotRef], set[str]]:
        """What is to be saved afterwards, and the names of what was taken."""
        if self._is_closed:
            return [], set()
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
        if features is not None and (
            tuple(features.shape) != (shape.num_tokens, shape.width) or str(features.dtype) != f"torch.{shape.dtype}"
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
        if self._is_closed:
            return
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


def timer(is_asynchronous: bool) -> Callable[[], Seconds]:
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


def current() -> RankFeatures | None:
    """Whose step this process is encoding in; None outside of one."""
    return _encoding
