# SPDX-License-Identifier: Apache-2.0
"""Requests out of the records that a server's `--observe` writes, which hold digests and counts, and no text.

A record names the earlier request with the longest beginning in common and says how many tokens that is. So each token
of a prompt belongs to the request that brought it first, and prompts that begin alike are known to do so. The engine
remembers earlier requests within a budget; a beginning that it had forgotten is taken for new.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec

from vllm_mmcache.traffic.requests import NoPrompt, Part, Picture, Prompt, Words

FORMAT = 1
DIGEST_BITS = 32
_WITH_STATES = ("sliding_window", "mamba", "chunked_local")
"""How the names of KV cache groups begin that need a state where a hit ends."""
_ABSENT_ON_STOCK = {
    "body": {"lifted"},
    "decode": {"skipped", "late"},
    "processor": {"deferred"},
    "features": {"ram", "disk", "remote", "tower_faster_than_disk", "tower_faster_than_remote"},
}
"""What images of a record say only where a component of the plugin was on."""
_BY_THE_TOWER = ("tower", "tower_faster_than_disk", "tower_faster_than_remote")


class _Image(msgspec.Struct):
    digest: str
    width: int | None = None
    height: int | None = None
    body: str = "unknown"
    decode: str = "unknown"
    processor: str = "unknown"
    features: str = "unknown"


class _Segment(msgspec.Struct):
    kind: str
    start: int
    tokens: int
    role: str | None = None
    turn: int | None = None
    image: _Image | None = None


class _Miss(msgspec.Struct):
    reason: str
    tokens: int


class _Group(msgspec.Struct):
    kind: str


class _Nearest(msgspec.Struct):
    id: str
    common_tokens: int
    same_salt: bool = True
    same_lora: bool = True


class Record(msgspec.Struct):
    """Of a record what an estimate asks; docs/explain.md describes the format. Units: tokens."""

    format: int
    id: str
    time_s: float
    prompt_tokens: int
    reused_tokens: int
    block_tokens: int
    segments: list[_Segment]
    engine: int = 0
    model: str = ""
    lora: str | None = None
    salt: str | None = None
    misses: list[_Miss] = []
    groups: list[_Group] = []
    nearest: _Nearest | None = None

    @property
    def keeps_all_kv(self) -> bool:
        """Whether a hit can end at any block, since no layer has a window or a recurrent state."""
        return not any(group.kind.startswith(_WITH_STATES) for group in self.groups)

    @property
    def state_blocks(self) -> float:
        """Blocks of the KV cache that a recurrent state takes, for each that a block of tokens takes."""
        num_recurrent = sum(group.kind.startswith("mamba") for group in self.groups)
        return num_recurrent / max(1, len(self.groups) - num_recurrent)


@dataclass(slots=True)
class _Known:
    """A request that was recorded. From `common` on its tokens are its own; those before are its parent's."""

    id: str
    prompt_tokens: int
    common: int = 0
    parent: "_Known | None" = None


@dataclass
class Recorded:
    """Makes prompts of records, and sums up what the server did for them. Units: tokens, images, Unix time."""

    first: Record | None = None
    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    missed_tokens: Counter[str] = field(default_factory=Counter)
    """By the reason for which they were computed."""
    decoded: int = 0
    processed: int = 0
    encoded: int = 0
    """Images that the vision tower ran for."""
    models: Counter[str] = field(default_factory=Counter)
    engines: set[int] = field(default_factory=set)
    on_stock: bool = True
    """No image was treated in a way that only a component of the plugin can."""
    first_s: float = float("inf")
    last_s: float = 0.0
    digests: set[bytes] = field(default_factory=set)
    _known: dict[str, _Known] = field(default_factory=dict)

    def prompt_of(self, value: Any) -> Prompt:
        """The prompt of a record's JSON. Raises: NoPrompt."""
        record = read(value)
        name = _request(record.id)
        if name in self._known:
            raise NoPrompt("another answer to a request that is counted")
        self._sum_up(record)
        known = self._known[name] = self._placed(name, record)
        return Prompt(tuple(_turns(record, known)), "/".join(filter(None, (record.salt, record.lora))))

    @property
    def mistaken(self) -> float:
        """How many pairs of images are expected to have one digest."""
        return len(self.digests) * (len(self.digests) - 1) / 2 / (1 << DIGEST_BITS)

    def _sum_up(self, record: Record) -> None:
        self.first = self.first or record
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.reused_tokens += record.reused_tokens
        for miss in record.misses:
            self.missed_tokens[miss.reason] += miss.tokens
        self.models[record.model] += 1
        self.engines.add(record.engine)
        self.first_s, self.last_s = min(self.first_s, record.time_s), max(self.last_s, record.time_s)
        for image in (segment.image for segment in record.segments if segment.image is not None):
            self.digests.add(_digest(image))
            self.decoded += image.decode in ("decoded", "late")
            self.processed += image.processor == "run"
            self.encoded += image.features in _BY_THE_TOWER
            self.on_stock &= not any(getattr(image, layer) in said for layer, said in _ABSENT_ON_STOCK.items())

    def _placed(self, name: str, record: Record) -> _Known:
        """Behind the request with which it has a beginning in common: the one that brought the last of its tokens."""
        nearest = record.nearest
        if nearest is None or not (nearest.same_salt and nearest.same_lora):
            return _Known(name, record.prompt_tokens)
        common = min(nearest.common_tokens, record.prompt_tokens)
        parent = self._known.get(_request(nearest.id)) or _Known(nearest.id, 0)
        if nearest.id != parent.id and common > parent.prompt_tokens:  # one of several answers
            parent = _Known(nearest.id, parent.prompt_tokens, parent.prompt_tokens, parent)
        while parent.parent is not None and common <= parent.common:
            parent = parent.parent
        return _Known(name, record.prompt_tokens, common, parent)


def read(value: Any) -> Record:
    """Of the JSON of a record. Raises: NoPrompt."""
    if value.get("format") != FORMAT:
        raise NoPrompt("a record of another format")
    try:
        record = msgspec.convert(value, Record)
    except msgspec.ValidationError as error:
        raise NoPrompt("no whole record") from error
    if not record.segments:
        raise NoPrompt("a record without segments")
    return record


def is_record(value: Any) -> bool:
    """Whether parsed JSON is a record of a server's `--observe`, and no request."""
    return isinstance(value, dict) and {"format", "segments", "prompt_tokens"} <= value.keys()


def older(path: Path) -> Path:
    """The file that a server has turned over last: the records before those in `path`."""
    return path.parent / f"{path.name}.1"


def _request(record_id: str) -> str:
    """One of several answers to a request has its number behind a dot."""
    return record_id.partition(".")[0]


def _digest(image: _Image) -> bytes:
    return image.digest.encode("utf-8", "surrogatepass")


def _turns(record: Record, known: _Known) -> Iterator[tuple[Part, ...]]:
    """Each turn with the role that speaks. Text is cut into the blocks of the KV cache, and where a prompt ended."""
    owners = list(_owners(known, record.prompt_tokens))[::-1]
    starts = [start for _, start, _ in owners]
    ends = {owner.prompt_tokens for owner, start, end in owners if start < owner.prompt_tokens <= end}
    for _, group in groupby(record.segments, lambda segment: segment.turn):
        segments = list(group)
        first = segments[0]
        parts: list[Part] = [Words(first.role or ("system" if first.kind == "system" else "user"), 0)]
        for segment in segments:
            end, image = segment.start + segment.tokens, segment.image
            if image is not None:
                parts.append(Picture(_digest(image), image.width or 0, image.height or 0, tokens=segment.tokens))
                continue
            block = record.block_tokens
            blocks = range((segment.start // block + 1) * block, end, block) if block > 0 else ()
            cuts = sorted({segment.start, end, *blocks, *(cut for cut in ends if segment.start < cut < end)})
            parts += [Words(_whose(owners, starts, *piece), piece[1] - piece[0]) for piece in pairwise(cuts)]
        yield tuple(parts)


def _owners(known: _Known, end: int) -> Iterator[tuple[_Known, int, int]]:
    """Which request brought which tokens first, from the end of a prompt to its beginning."""
    at: _Known | None = known
    while at is not None and end > 0:
        if at.common < end:
            yield at, at.common, end
            end = at.common
        at = at.parent


def _whose(owners: list[tuple[_Known, int, int]], starts: list[int], start: int, end: int) -> str:
    """Stands for a piece of text: who brought which of its tokens. starts: of the owners' tokens."""
    first, last = bisect_right(starts, start) - 1, bisect_left(starts, end)
    return " ".join(f"{owner.id}:{max(start, at)}-{min(end, until)}" for owner, at, until in owners[first:last])
