# SPDX-License-Identifier: Apache-2.0
"""Why the rest of a prompt was not reused: one reason for every run of its tokens. Scheduler thread; pure.

The prompt is cut at three places: where the hit ends, where the content stops being known, and its end. Between the
first two the cause lies in the cache; behind the second, in what the request says (differences.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mmcache.components.observe.record.differences import behind
from vllm_mmcache.components.observe.record.history import Entry, HistoryMatch
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.components.observe.record.wire import Cause


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


def explain(prompt: Entry, found: HistoryMatch, lookup: Lookup) -> list[Cause]:
    """The causes in the prompt's order; together they cover all that the hit does not.

    The prompt must be remembered, since its tokens are read from its entry, unless nothing was looked up.
    """
    total, hit = prompt.prompt_tokens, lookup.hit_tokens
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
        reason = Reason.OTHER_SALT if entry.salt != prompt.salt else Reason.OTHER_LORA
        if reason is Reason.OTHER_LORA:
            details |= {"was": entry.lora, "now": prompt.lora}
        causes.append(Cause(reason, start, until - start, start, details))
        start = until
    if start < total:
        causes += behind(prompt, found.nearest.entry if found.nearest else None, start)
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
