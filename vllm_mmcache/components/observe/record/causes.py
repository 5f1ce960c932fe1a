# SPDX-License-Identifier: Apache-2.0
"""Why the rest of a prompt was not reused: one reason for every run of its tokens. Scheduler thread; pure.

The prompt is cut at three places: where the hit ends, where the content stops being known, and its end. Between the
first two the cause lies in the cache; behind the second, in what the request says.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mmcache.components.observe.record import wire
from vllm_mmcache.components.observe.record.history import Entry, HistoryMatch, Match
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.components.observe.record.wire import Cause

MIN_SHARED_TOKENS = 8  # shorter pieces (headers, newlines) recur by themselves


@dataclass(frozen=True)
class Lost:
    """What the cache says about the first block that a group lacks."""

    reason: Reason
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupHit:
    """How far one KV cache group alone would have come. Units: tokens.

    is_dense: it keeps every block, as full attention does.
    """

    index: int
    kind: str
    block_tokens: int
    is_dense: bool
    hit_tokens: int


@dataclass(frozen=True)
class Prompt:
    """The new request, as far as its causes are concerned."""

    tokens: Sequence[int]
    entry: Entry


@dataclass(frozen=True)
class Lookup:
    """What the cache gave. Units: tokens.

    hit_unit: a hit ends at a multiple of it. held_back: the end that is never used.
    """

    hit_tokens: int
    hit_unit: int
    off: str
    """Why nothing was looked up; empty if it was."""
    groups: Sequence[GroupHit] = ()
    held_back: int = 1
    lost: Callable[[GroupHit], Lost] = lambda group: Lost(Reason.UNEXPLAINED)


def explain(prompt: Prompt, found: HistoryMatch, lookup: Lookup) -> list[Cause]:
    """The causes in the prompt's order; together they cover all that the hit does not."""
    total, hit = len(prompt.tokens), lookup.hit_tokens
    if hit >= total:
        return []
    if lookup.off:
        return [Cause(Reason.CACHING_OFF, hit, total - hit, hit, {"by": lookup.off})]
    common = min(max(found.nearest.common_tokens if found.nearest else 0, hit), total)
    causes = _known_but_missed(hit, common, total, lookup)
    start = common
    if start < total and found.elsewhere is not None:
        entry, until = found.elsewhere.entry, min(found.elsewhere.common_tokens, total)
        details = {"other": entry.id}
        reason = Reason.OTHER_SALT if entry.salt != prompt.entry.salt else Reason.OTHER_LORA
        if reason is Reason.OTHER_LORA:
            details |= {"was": entry.lora, "now": prompt.entry.lora}
        causes.append(Cause(reason, start, until - start, start, details))
        start = until
    if start < total:
        causes.append(_unknown(prompt, found.nearest, start, total))
    return causes


def _known_but_missed(hit: int, common: int, total: int, lookup: Lookup) -> list[Cause]:
    if hit >= common:
        return []
    unit = lookup.hit_unit
    possible = max(min(common, total - lookup.held_back) // unit * unit, 0)
    if hit >= possible:
        if common == total and total % unit == 0:
            return [Cause(Reason.LAST_TOKEN, hit, total - hit, total - 1, {})]
        return [Cause(Reason.BLOCK_TAIL, hit, common - hit, hit, {"block_tokens": unit})]
    dense = [group for group in lookup.groups if group.is_dense]
    first = min(dense, key=lambda group: group.hit_tokens, default=None)
    reach = possible if first is None else min(max(first.hit_tokens, hit), possible)
    causes = []
    if reach > hit:
        sparse = [group for group in lookup.groups if not group.is_dense]
        behind = [group for group in sparse if group.hit_tokens < reach] or sparse
        until = common if reach == possible else reach
        if behind:
            group = min(behind, key=lambda group: group.hit_tokens)
            lost = lookup.lost(group)
            evicted = lost.reason is Reason.EVICTED
            details = {"group": group.index, "kind": group.kind, "others_hit_tokens": reach, **lost.details}
            reason = Reason.EVICTED if evicted else Reason.STATE_NOT_KEPT
            causes.append(Cause(reason, hit, until - hit, hit, details))
        else:
            causes.append(Cause(Reason.UNEXPLAINED, hit, until - hit, hit, {}))
    if reach < possible:
        assert first is not None
        start = max(reach, hit)
        lost = lookup.lost(first)
        causes.append(Cause(lost.reason, start, common - start, start, {"group": first.index, **lost.details}))
    return causes


def _unknown(prompt: Prompt, nearest: Match | None, start: int, total: int) -> Cause:
    if nearest is None or start >= nearest.entry.total:
        return Cause(Reason.NEW_CONTENT, start, total - start, start, {})
    reason, details = _difference(prompt, nearest.entry, start)
    return Cause(reason, start, total - start, start, details)


def _difference(prompt: Prompt, earlier: Entry, at: int) -> tuple[Reason, dict[str, Any]]:
    now, then = wire.read_notes(prompt.entry.notes), wire.read_notes(earlier.notes)
    ours, theirs = _image_at(now.spans, at), _image_at(then.spans, at)
    if ours is not None and theirs is not None:
        return Reason.IMAGE_DIFFERS, {"image": ours, "what": _what_differs(now.images[ours], then.images[theirs])}
    turn = bisect_right(now.turns, at) - 1
    if ours is None and theirs is None and then.turns and turn >= 0:
        if at > then.turns[-1]:
            if turn < len(now.roles) - 1 and now.roles[turn] == "assistant":
                return Reason.TEXT_DIFFERS, {"turn": turn, "answer": True}
        elif then.messages and then.messages == now.messages[: len(then.messages)]:
            return Reason.TEMPLATE_REWROTE, {"turn": turn}
    pieces = _pieces(prompt.tokens, now, prompt.entry.prompt_tokens, at)
    their_pieces = _pieces(earlier.slice(0, earlier.prompt_tokens), then, earlier.prompt_tokens, at)
    shared = _shared_later(pieces, their_pieces)
    shared += _images_later(now.spans, then.spans, at)
    return (Reason.TEXT_DIFFERS, {"same_later_tokens": shared}) if shared else (Reason.NEW_CONTENT, {})


def _image_at(spans: Sequence[wire.Span], at: int) -> int | None:
    """Number of the image that begins at `at`, or that `at` lies in."""
    return next((index for index, (offset, length, _) in enumerate(spans) if offset <= at < offset + length), None)


def _what_differs(ours: tuple[str, str, int, int], theirs: tuple[str, str, int, int]) -> str:
    (content, settings, *size), (their_content, their_settings, *their_size) = ours, theirs
    if content and their_content:
        if content == their_content:
            return "settings"
    elif settings != their_settings and size == their_size:
        return "settings"
    return "bytes" if size == their_size else "size"


def _shared_later(ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]]) -> int:
    """Text tokens behind a difference that the earlier request has there, too: whole pieces, or the end of one."""
    known = set(theirs[1:])
    shared = sum(len(piece) for piece in ours[1:] if piece in known and len(piece) >= MIN_SHARED_TOKENS)
    if ours and theirs:
        tail = 0
        for a, b in zip(reversed(ours[0]), reversed(theirs[0]), strict=False):
            if a != b:
                break
            tail += 1
        shared += tail if tail >= MIN_SHARED_TOKENS else 0
    return shared


def _images_later(ours: Sequence[wire.Span], theirs: Sequence[wire.Span], at: int) -> int:
    """The same of the images' tokens."""
    names = {name for offset, _, name in theirs if offset > at}
    return sum(length for offset, length, name in ours if offset > at and name in names)


def _pieces(tokens: Sequence[int], notes: wire.Notes, end: int, at: int) -> list[tuple[int, ...]]:
    """The text behind `at`, cut at turns and images; the first piece is the rest of the one that `at` lies in."""
    spans = [(offset, offset + length) for offset, length, _ in notes.spans]
    cuts = sorted({at, end, *notes.turns, *(cut for span in spans for cut in span)})
    inside = {span[0] for span in spans}
    return [tuple(tokens[a:b]) for a, b in itertools.pairwise(cuts) if a >= at and a not in inside and b <= end]
