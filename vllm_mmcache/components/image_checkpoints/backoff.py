# SPDX-License-Identifier: Apache-2.0
"""Learns whether checkpoints are worth their memory, from those used and those evicted unused. Pure, no vLLM.

Memory costs something only where a cache evicts. What costs steps of the engine has to pay as well (expected_value.py).
Where every picture is unique, a checkpoint at its end is never used and only displaces other blocks. Starts and ends
are judged apart: behind a shared system prompt the start of a unique picture pays, its end does not.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm_mmcache.base.lru import Size
from vllm_mmcache.components.image_checkpoints.positions import KINDS, Checkpoint

PATIENCE = 32  # checkpoints of a kind evicted unused in a row, until the kind is given up
PROBE_EVERY = 16  # then one request in so many makes some all the same, to find out whether they pay again
LOOK_AT = 8  # tracked checkpoints that are looked at per request; more than a request makes, so the sweep keeps up


@dataclass
class Backoff:
    """Which kinds of checkpoint are wanted. Not thread-safe: the scheduler's thread alone."""

    credit: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, PATIENCE))
    requests: int = 0

    def ask(self) -> frozenset[str]:
        """The kinds that the next request may make; once per request."""
        self.requests += 1
        if self.requests % PROBE_EVERY == 0:
            return KINDS
        return self.wanted()

    def wanted(self) -> frozenset[str]:
        """The kinds that pay, as far as is known."""
        return frozenset(kind for kind, credit in self.credit.items() if credit)

    def record_hit(self, kinds: Iterable[str]) -> None:
        """One of these kinds was used, or would have been."""
        self.credit.update(dict.fromkeys(kinds, PATIENCE))

    def wastes(self, kinds: Iterable[str]) -> None:
        """One of these kinds was evicted unused."""
        for kind in kinds:
            self.credit[kind] = max(0, self.credit[kind] - 1)


@dataclass
class _Tracked:
    """A checkpoint that the KV cache holds, as far as is known, and whether a hit has ended at it."""

    checkpoint: Checkpoint
    was_used: bool = False


class TrackedCheckpoints:
    """The checkpoints that the KV cache holds, by block key; tells the learner how each of them ended."""

    def __init__(self, backoff: Backoff) -> None:
        self.backoff = backoff
        self._tracked: OrderedDict[bytes, _Tracked] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tracked)

    def size(self) -> Size:
        """How many there are. The KV cache is theirs and vLLM's, and has the bound."""
        return Size(len(self))

    def add(self, key: bytes, checkpoint: Checkpoint) -> bool:
        """A checkpoint was made; False if it is known already."""
        if key in self._tracked:
            return False
        self._tracked[key] = _Tracked(checkpoint)
        return True

    def use(self, key: bytes) -> Checkpoint | None:
        """A prefix hit ended at this key: the checkpoint there, if there is one."""
        tracked = self._tracked.get(key)
        if tracked is None:
            return None
        tracked.was_used = True
        self.backoff.record_hit(tracked.checkpoint.kinds)
        return tracked.checkpoint

    def sweep(self, is_cached: Callable[[bytes], bool]) -> int:
        """Look at the next few; returns how many of them were evicted unused."""
        unused = 0
        for _ in range(min(LOOK_AT, len(self._tracked))):
            key, tracked = self._tracked.popitem(last=False)
            if is_cached(key):
                self._tracked[key] = tracked
            elif not tracked.was_used:
                self.backoff.wastes(tracked.checkpoint.kinds)
                unused += 1
        return unused

    def clear(self) -> None:
        """The KV cache was reset, which says nothing about what pays."""
        self._tracked.clear()
