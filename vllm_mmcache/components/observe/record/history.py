# SPDX-License-Identifier: Apache-2.0
"""What the engine remembers of earlier requests: which blocks they had, and how they went on. Scheduler thread.

Knows no vLLM. Requests form a tree: one that shares its first blocks with an earlier one remembers only its own rest.
Block keys are chained, so that a key that is known vouches for everything before it, and the longest known beginning
is found by bisection. Token ids stay in this process and never go into a record. Bounded in bytes.

A request is compared with those of its own salt alone, unless the operator asks for more: how far two prompts agree
tells, guess by guess, what the other one says.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mmcache.base.lru import Size
from vllm_mmcache.components.observe.record import wire

BRANCHES = 4  # requests remembered per place at which they went different ways
STARTS = 8  # requests remembered per salt and first block, whatever their adapter
_ENTRY_BYTES = 1024
_KEY_BYTES = 200


@dataclass(eq=False)
class Entry:
    """One remembered request. Its own tokens and keys begin at `base`; what is before them, its parent has.

    Units: base, images_end and prompt_tokens in tokens; time_s in seconds since the epoch.
    """

    id: str
    time_s: float
    salt: str
    """The whole salt's digest; see digests.salt_class. Empty without one, which is a class of its own."""
    lora: str
    prompt_tokens: int
    images_end: int = 0
    """Tokens up to the end of the last image; 0 without images."""
    first_images: tuple[str, ...] = ()
    """Identifiers of the images that begin in the first block."""
    notes: str = ""
    """What the API server sent of it; see wire.read_notes. It is read where requests are compared."""
    request: Any = None
    """vLLM's request while it runs; it knows how much is computed."""
    num_computed: int = 0
    """Tokens whose KV it had computed when it ended."""
    parent: "Entry | None" = None
    base: int = 0
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    keys: list[bytes] = field(default_factory=list)
    branch: object = None
    start: object = None
    num_children: int = 0

    @property
    def total(self) -> int:
        """Tokens known of it: the prompt, and what of the answer has KV."""
        return self.base + len(self.tokens)

    @property
    def size_bytes(self) -> int:
        """The memory it takes, estimated, in bytes: of tokens and keys its own alone."""
        return _ENTRY_BYTES + 4 * len(self.tokens) + _KEY_BYTES * len(self.keys) + len(self.notes)

    def slice(self, start: int, end: int) -> "array[int]":
        """Tokens from `start` to `end`, through its parents."""
        found = array("i")
        for entry, until in reversed(self._parts(start, end)):
            if until > start:
                found += entry.tokens[max(start - entry.base, 0) : until - entry.base]
        return found

    def _parts(self, start: int, end: int) -> "list[tuple[Entry, int]]":
        parts, entry, until = [], self, min(end, self.total)
        while True:
            if until > entry.base:
                parts.append((entry, until))
                until = entry.base
            if entry.parent is None or until <= start:
                return parts
            entry = entry.parent


@dataclass(frozen=True)
class Match:
    """The remembered request that shares most with a new one; common_tokens from the start, images included."""

    entry: Entry
    common_tokens: int


@dataclass(frozen=True)
class HistoryMatch:
    """What is known of a new request. num_known is in blocks, under its own salt and adapter."""

    num_known: int
    nearest: Match | None
    elsewhere: Match | None
    """A request under another adapter that shares more; or under another salt, where that is asked for."""


class History:
    """Remembered requests, used longest ago forgotten first; a request outlives those that build on it.

    Units: budget_bytes counts what `Entry.size_bytes` estimates. across_salts: compare requests of different salts.
    """

    def __init__(
        self, block_tokens: int, budget_bytes: Callable[[], int], across_salts: Callable[[], bool] = lambda: False
    ) -> None:
        self.block_tokens = block_tokens
        self.size_bytes = 0
        self._budget = budget_bytes
        self._across_salts = across_salts
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._by_key: dict[bytes, Entry] = {}
        self._branches: dict[object, deque[Entry]] = {}
        self._starts: dict[object, deque[Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def size(self) -> Size:
        """What there is, and what there may be."""
        return Size(len(self), self.size_bytes, self._budget())

    def owner(self, key: bytes) -> Entry | None:
        """The request that had the block of this key first."""
        return self._by_key.get(key)

    def find(self, new: Entry, prompt: Sequence[int], keys: Sequence[bytes]) -> HistoryMatch:
        """Look a new request up; `new` is not remembered by this.

        prompt and keys are those of its whole prompt: token ids, and a key for each full block.
        """
        salt = "" if self._across_salts() else new.salt
        new.start = salt, hash((tuple(prompt[: self.block_tokens]), new.first_images))
        known = self._count_known(keys)
        at = known * self.block_tokens
        candidates = list(self._branches.get(keys[known - 1] if known else (new.salt, new.lora), ()))
        if known:
            candidates.append(self._by_key[keys[known - 1]])
        nearest: Match | None = None
        for entry in candidates:
            if entry.salt != new.salt:  # vLLM's keys hold the salt; this does not depend on it
                continue
            limit = min(len(prompt), entry.total, at + self.block_tokens)
            match = Match(entry, _common(new, entry, prompt, at, limit))
            if nearest is None or _better(match, nearest):
                nearest = match
        if nearest is not None and not nearest.common_tokens:
            nearest = None
        return HistoryMatch(known, nearest, self._elsewhere(new, prompt, nearest))

    def remember(self, new: Entry, prompt: Sequence[int], keys: Sequence[bytes], num_known: int) -> None:
        """Keep a request below the known one that it continues.

        `find` must have been called with `new`; num_known, in blocks, is its answer.
        """
        new.branch = keys[num_known - 1] if num_known else (new.salt, new.lora)
        new.parent = self._by_key[keys[num_known - 1]] if num_known else None
        new.base = num_known * self.block_tokens
        new.tokens = array("i", prompt[new.base :])
        self._branches.setdefault(new.branch, deque(maxlen=BRANCHES)).append(new)
        self._starts.setdefault(new.start, deque(maxlen=STARTS)).append(new)
        self._own(new, keys[num_known:])
        self._entries[id(new)] = new
        self.size_bytes += new.size_bytes
        if new.parent is not None:
            new.parent.num_children += 1
        self._make_room()

    def finish(self, entry: Entry, answer: Sequence[int], keys: Sequence[bytes], num_computed: int) -> None:
        """A request has ended: keep the answer's tokens that have KV.

        keys are those of prompt and answer, one for each full block; num_computed counts tokens of both.
        """
        entry.request = None
        entry.num_computed = num_computed
        if id(entry) not in self._entries:
            return
        self.size_bytes -= entry.size_bytes
        if num_computed > entry.prompt_tokens:
            entry.tokens.extend(answer[: num_computed - entry.prompt_tokens])
            first = entry.base // self.block_tokens + len(entry.keys)
            self._own(entry, keys[first : num_computed // self.block_tokens])
        self.size_bytes += entry.size_bytes
        self._make_room()

    def _own(self, entry: Entry, keys: Sequence[bytes]) -> None:
        entry.keys.extend(keys)
        for key in keys:
            self._by_key.setdefault(key, entry)

    def _count_known(self, keys: Sequence[bytes]) -> int:
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._by_key:
                low = middle + 1
            else:
                high = middle
        return low

    def _elsewhere(self, new: Entry, prompt: Sequence[int], nearest: Match | None) -> Match | None:
        """Only asked where much is unknown, since a whole prompt is compared."""
        common = nearest.common_tokens if nearest else 0
        best: Match | None = None
        if len(prompt) - common <= 2 * self.block_tokens and common:
            return None
        others = [
            entry for entry in self._starts.get(new.start, ()) if (entry.salt, entry.lora) != (new.salt, new.lora)
        ]
        for entry in reversed(others[-2:]):
            match = Match(entry, _common(new, entry, prompt, 0, min(len(prompt), entry.total)))
            if match.common_tokens > max(common, best.common_tokens if best else 0):
                best = match
        return best

    def _make_room(self) -> None:
        budget = self._budget()
        while self.size_bytes > budget and self._entries:
            name, entry = self._entries.popitem(last=False)
            if entry.num_children:
                self._entries[name] = entry  # others build on it
                continue
            if entry.parent is not None:
                entry.parent.num_children -= 1
            self.size_bytes -= entry.size_bytes
            for key in entry.keys:
                if self._by_key.get(key) is entry:
                    del self._by_key[key]
            for table, place in ((self._branches, entry.branch), (self._starts, entry.start)):
                left = table.get(place, ())
                if entry in left:
                    left.remove(entry)  # type: ignore[union-attr]
                if not left:
                    table.pop(place, None)


def _better(match: Match, than: Match) -> bool:
    """More in common; of two that share as much, the later one."""
    return (match.common_tokens, match.entry.time_s) > (than.common_tokens, than.entry.time_s)


def _common(new: Entry, entry: Entry, prompt: Sequence[int], start: int, end: int) -> int:
    """How far a prompt and a remembered request agree, when they agree up to `start`, images included."""
    ours, theirs = array("i", prompt[start:end]), entry.slice(start, end)
    common = end
    if ours != theirs:
        common = start + next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
    if new.images_end <= start:
        return common
    spans, their_spans = wire.read_notes(new.notes).spans, wire.read_notes(entry.notes).spans
    first = bisect_left(spans, (start,))
    for (offset, _, name), (their_offset, _, their_name) in zip(spans[first:], their_spans[first:], strict=False):
        if offset >= common:
            break
        if (offset, name) != (their_offset, their_name):
            return max(min(common, offset, their_offset), start)
    return common
