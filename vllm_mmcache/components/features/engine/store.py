# SPDX-License-Identifier: Apache-2.0
"""The store of an engine: features by identity in RAM, then on disk, then in Redis or Valkey. Engine process.

RAM is the arena that the engine shares with its ranks, so what is found there is where they can copy it from. What
lies further away is fetched into it by threads, begun before its request is scheduled; what a request waits for is
fetched before what one will need later. What the ranks put there is written further by threads. Nothing here waits for
a tier, and nothing here raises because of one.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter

from vllm_mmcache.base import background
from vllm_mmcache.base.lru import Budget
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.cost_model import CostModel, TierChoice
from vllm_mmcache.components.features.engine.ram_tier import RamTier, Slot
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.message import SEAL_BYTES
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.components.features.tiers import load, save
from vllm_mmcache.metrics import table_sizes
from vllm_mmcache.storage.tier import Tier
from vllm_mmcache.storage.write_behind import EXIT_S, MOST_WAITING, WriteBehind

MOST_READERS = 4  # threads that read from one tier; of two on one core, each would keep the other from its locks
RENEW_S = 3600.0  # what is used in RAM for so long is marked as used in the tiers below, too
LONGEST_LOAD_S = 10.0  # a package that takes longer is given up, whoever waits for it
# A header holds the identity as a whole; our own content ids have 64 characters.
MAX_IDENTIFIER_CHARS = 16 * 1024


@dataclass(eq=False)
class Fetch:
    """One image's features on their way into RAM. Written by one thread at a time; read by any."""

    identity: Identity
    shape: Shape
    pixels_s: float = 0.0
    """What the tower would have to wait for its pixels before it could run."""
    is_done: bool = False
    source: str = ""
    """The tier that had them, once done; empty where none had."""
    is_urgent: bool = False
    """Whether a request that could go on otherwise waits for it."""
    is_probe: bool = False
    """Whether a tier is only asked to measure it."""
    is_filled_by_rank: bool = False
    """Whether its end is that of a rank's copy, whatever tiers find meanwhile."""
    passed_over: list[str] = field(default_factory=list)
    """Tiers that were not asked, since the tower is faster."""
    queued_for: Tier | None = None
    """The tier for whose reader it waits."""
    begun: float = math.inf
    """When the last tier began to load it, or a rank was to fill it."""

    @property
    def is_stuck(self) -> bool:
        """Whether it takes longer than anything that may still come, or waits behind a load that does."""
        if self.is_done:
            return False
        if (tier := self.queued_for) is not None:
            return tier.is_open()
        return monotonic() - self.begun > LONGEST_LOAD_S

    @property
    def is_waited_for(self) -> bool:
        """Whether it may be worth holding a request back for it."""
        return not (self.is_probe or self.is_stuck)


class _Queue:
    """Fetches that wait for a thread that reads from one tier, the urgent ones first. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urgent: OrderedDict[Fetch, None] = OrderedDict()
        self._others: OrderedDict[Fetch, None] = OrderedDict()

    def add(self, fetch: Fetch) -> None:
        with self._lock:
            (self._urgent if fetch.is_urgent else self._others)[fetch] = None

    def give_back(self, fetch: Fetch) -> Fetch:
        """Take out a fetch for which no thread will come, and return it.

        Where a thread that came for another one has taken it, one of those that are left: they are one too many.
        """
        with self._lock:
            for queue in (self._others, self._urgent):
                if fetch in queue:
                    del queue[fetch]
                    return fetch
            return (self._others or self._urgent).popitem()[0]

    def hurry(self, fetch: Fetch) -> None:
        """It is urgent now, wherever it is."""
        with self._lock:
            if fetch in self._others:
                del self._others[fetch]
                self._urgent[fetch] = None

    def take(self) -> Fetch | None:
        """The next one; None where another one has taken it."""
        with self._lock:
            found = self._urgent or self._others
            return found.popitem(last=False)[0] if found else None


class Store:
    """Features by identity over the arena's RAM tier and the tiers below it, nearest first. Any thread."""

    def __init__(self, arena: Arena, ram: RamTier, below: Sequence[Tier], costs: CostModel) -> None:
        self.ram = ram
        self.below = tuple(below)
        self.costs = costs
        self._arena = arena
        num_readers = background.busy_thread_limit(MOST_READERS)
        self._readers = {tier.name: Threads(f"read-{tier.name}", num_readers) for tier in below}
        self._queues = {tier.name: _Queue() for tier in below}
        self._writers = {tier.name: self._writer(tier) for tier in below}
        # In time for the one that would let go of it first.
        self._renew_s = min([RENEW_S, *(tier.ttl_s / 2 for tier in below if tier.ttl_s)])
        table_sizes.of_engine("features_ram", ram.size)
        for tier in below:
            table_sizes.of_engine(f"features_{tier.name}", tier.size)
            table_sizes.of_engine(f"waiting_for_{tier.name}", self._writers[tier.name].size)
        self._fetches: dict[str, Fetch] = {}
        self._changed = threading.Condition()

    def fetch(self, identity: Identity, shape: Shape, pixels_s: float = 0.0, is_urgent: bool = False) -> Fetch:
        """Have features brought into RAM, if some tier has them; a fetch that is under way is joined. Never waits.

        pixels_s: seconds that it would take to make the pixels that the tower lacks; infinite where that is not known.
        """
        with self._changed:
            under_way = self._fetches.get(identity.key)
            if under_way is None:
                fetch = Fetch(identity, shape, pixels_s, is_urgent=is_urgent)
                if self.ram.has(identity.key):
                    fetch.is_done, fetch.source = True, self.ram.name
                    return fetch
                self._fetches[identity.key] = fetch
        if under_way is not None:
            if is_urgent:
                self.hurry(under_way)
            return under_way
        self._ask_from(fetch, 0)
        return fetch

    def hurry(self, fetch: Fetch) -> None:
        """A request waits for it now: it comes before those of which none does."""
        if not fetch.is_urgent:
            fetch.is_urgent = True
            for queue in self._queues.values():
                queue.hurry(fetch)

    def wait(self, fetches: Iterable[Fetch], timeout_s: float) -> bool:
        """Wait until all are done. Returns False after `timeout_s`."""
        waited_for = list(fetches)
        with self._changed:
            return self._changed.wait_for(lambda: all(one.is_done for one in waited_for), timeout_s)

    def find(self, identity: Identity, shape: Shape) -> Slot | None:
        """The features in RAM, held for the caller until it calls `release`.

        None where they are not there, or have another size. Tiers that are owed them are handed them, unless they are
        left alone now.
        """
        slot = self.ram.find(identity.key)
        if slot is not None and slot.num_bytes != shape.num_bytes + SEAL_BYTES:
            self.ram.release(slot)
            return None
        if slot is not None:
            if monotonic() - slot.touched_s > self._renew_s:
                slot.touched_s = monotonic()
                slot.pending_tiers.update(tier.name for tier in self.below)
            for tier in self.below:
                if tier.name in slot.pending_tiers and tier.is_taking():
                    self._writers[tier.name].submit(identity.key, (identity, shape))
        return slot

    def hold_if_there(self, identity: Identity, shape: Shape) -> Slot | None:
        """The features in RAM, so that `find` will find them, too; held as by `find`, which counts it."""
        slot = self.ram.hold_if_there(identity.key)
        if slot is not None and slot.num_bytes != shape.num_bytes + SEAL_BYTES:
            self.ram.release(slot)
            return None
        return slot

    def release(self, slot: Slot) -> None:
        """The caller of `find` or `hold_if_there` needs it no longer."""
        self.ram.release(slot)

    def reserve(self, identity: Identity, shape: Shape) -> Slot | None:
        """Room that a rank will fill; then `keep` or `discard` it. None where there is none, or it is being filled."""
        with self._changed:
            under_way = self._fetches.get(identity.key)
            if under_way is not None and under_way.is_probe and not under_way.is_stuck:
                # A load is being timed: if the tower filled the slot first, there would be no measurement.
                return None
            slot = self._reserve(identity, shape)
            if slot is not None:  # whoever wants it meanwhile waits for the rank
                filled = Fetch(identity, shape, begun=monotonic())
                self._fetches.setdefault(identity.key, filled).is_filled_by_rank = True
        return slot

    def keep(self, slot: Slot, identity: Identity, shape: Shape) -> None:
        """The slot is filled: it can be found, and is written to the tiers below."""
        self._publish(slot, identity, shape, self.below)
        self._finish(self._fetches.get(identity.key), self.ram.name)

    def discard(self, slot: Slot, identity: Identity) -> None:
        """The slot was not filled."""
        self.ram.discard(slot)
        self._finish(self._fetches.get(identity.key), "")

    @contextmanager
    def ram_alone(self) -> Iterator[None]:
        """In the block features are kept in RAM and nowhere else, whatever the settings say. Of a trial, at start."""
        below, keeps = self.below, self.ram.keeps
        self.below, self.ram.keeps = (), True
        try:
            yield
        finally:
            self.ram.clear()
            self.below, self.ram.keeps = below, keeps

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that is in RAM is written or given up, in all tiers. Returns False after `timeout_s`."""
        deadline = monotonic() + timeout_s
        flushed = [writer.flush(max(0.0, deadline - monotonic())) for writer in self._writers.values()]
        return all(flushed)

    def drop_writes(self) -> None:
        """Write no more to the tiers below, nor what waits for them; what is being written now is written."""
        for writer in self._writers.values():
            writer.drop()

    def close(self, timeout_s: float = EXIT_S) -> bool:
        """Flush, end the threads, let go of files and connections, and forget what is in RAM, in about `timeout_s`.

        Returns what `flush` did.
        """
        for readers in self._readers.values():
            readers.close()
        deadline = monotonic() + timeout_s
        closed = [writer.close(max(0.1, deadline - monotonic())) for writer in self._writers.values()]
        for tier in self.below:
            tier.close()
        self.ram.clear()
        self.costs = CostModel(lambda num_tokens: None, None)  # the tower's lie in the arena
        return all(closed)

    def counts(self) -> dict[str, dict[str, float]]:
        """The counts of each tier, by the tier's name; see storage/tier_counts.py."""
        tiers: list[RamTier | Tier] = [self.ram, *self.below]
        return {tier.name: tier.counts.snapshot() for tier in tiers}

    def _ask_from(self, fetch: Fetch, index: int) -> None:
        """Have the next tier asked that is worth it; without one, or where this fails, the fetch is done."""
        is_asked = False
        try:
            is_asked = self._ask(fetch, index)
        finally:
            if not is_asked:
                with self._changed:
                    if not fetch.is_filled_by_rank:
                        self._finish(fetch, "")

    def _ask(self, fetch: Fetch, index: int) -> bool:
        """Whether a tier was found that is worth asking, and will be asked."""
        for number, tier in enumerate(self.below[index:], index):
            if fetch.is_done or fetch.is_filled_by_rank or len(fetch.identity.identifier) > MAX_IDENTIFIER_CHARS:
                break
            if tier.is_open():
                tier.counts.add(misses=1)
                continue
            ask = self.costs.ask(tier.name, fetch.shape.num_tokens, fetch.shape.num_bytes, fetch.pixels_s)
            if ask is TierChoice.SKIP:
                fetch.passed_over.append(tier.name)
                continue
            fetch.is_probe = ask is TierChoice.PROBE
            if fetch.is_probe:
                fetch.passed_over.append(tier.name)
            fetch.queued_for = tier
            self._queues[tier.name].add(fetch)
            if self._readers[tier.name].submit(partial(self._load_next, number)):
                return True
            tier.counts.add(misses=1)
            left = self._queues[tier.name].give_back(fetch)
            left.queued_for = None
            if left is not fetch:
                self._ask_from(left, number + 1)
                return True
        return False

    def _load_next(self, index: int) -> None:
        fetch = self._queues[self.below[index].name].take()
        if fetch is None or fetch.is_done:  # a rank was faster
            return
        found = False
        try:
            found = self._load(fetch, index)
        finally:
            if found:
                self._finish(fetch, self.below[index].name)
            else:
                self._ask_from(fetch, index + 1)

    def _load(self, fetch: Fetch, index: int) -> bool:
        tier, identity, shape = self.below[index], fetch.identity, fetch.shape
        fetch.begun, fetch.queued_for = monotonic(), None
        slots: list[Slot] = []

        def reserve() -> memoryview | None:
            slot = self._reserve(identity, shape)
            if slot is None:
                return None
            slots.append(slot)
            return self._arena.buffer(slot.offset, shape.num_bytes)

        start = perf_counter()
        found = False
        try:
            found = load(tier, identity, shape, reserve, monotonic() + LONGEST_LOAD_S)
        finally:
            for slot in () if found else slots:
                self.ram.discard(slot)
        if found:
            self.costs.loaded(tier.name, shape.num_bytes, perf_counter() - start)
            self._publish(slots[0], identity, shape, self.below[:index])
        return found

    def _publish(self, slot: Slot, identity: Identity, shape: Shape, owed: Sequence[Tier]) -> None:
        slot.pending_tiers.update(tier.name for tier in owed)
        slot.touched_s = monotonic()
        self.ram.publish(slot)
        for tier in owed:
            self._writers[tier.name].submit(identity.key, (identity, shape))
        self.ram.release(slot)

    def _writer(self, tier: Tier) -> WriteBehind[str, tuple[Identity, Shape]]:
        """The queue of names in front of a tier: what is let go from RAM before its turn is dropped.

        What a tier did not take, since it was behind or left alone, it is owed: it is submitted again when the image
        comes again.
        """

        def write(items: Mapping[str, tuple[Identity, Shape]]) -> None:
            for identity, shape in items.values():
                self._save(tier, identity, shape)

        return WriteBehind(tier, write, budget=Budget(MOST_WAITING, 1), batch=Budget(1, 1))

    def _save(self, tier: Tier, identity: Identity, shape: Shape) -> None:
        slot = self.ram.hold_if_there(identity.key)
        if slot is None:
            tier.counts.add(dropped=1)
            return
        try:
            is_kept = save(tier, identity, shape, self._arena.buffer(slot.offset, shape.num_bytes))
            if is_kept or shape.num_bytes > tier.max_bytes:  # which it never takes
                slot.pending_tiers.discard(tier.name)
        finally:
            self.ram.release(slot)

    def _reserve(self, identity: Identity, shape: Shape) -> Slot | None:
        if len(identity.identifier) > MAX_IDENTIFIER_CHARS:
            self.ram.counts.add(dropped=1)
            return None
        return self.ram.reserve(identity.key, shape.num_bytes + SEAL_BYTES)

    def _finish(self, fetch: Fetch | None, source: str) -> None:
        with self._changed:
            if fetch is not None and self._fetches.get(fetch.identity.key) is fetch:
                del self._fetches[fetch.identity.key]
                fetch.is_done, fetch.source = True, source
            self._changed.notify_all()
