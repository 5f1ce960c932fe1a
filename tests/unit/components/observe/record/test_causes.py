# SPDX-License-Identifier: Apache-2.0
"""Causes that need LoRA adapters or group layouts which the zoo has not, and the cover of every prompt."""

import pytest

from vllm_mmcache.components.observe.record.causes import GroupHit, Lookup, Lost, explain
from vllm_mmcache.components.observe.record.history import Entry, HistoryMatch, Match
from vllm_mmcache.components.observe.record.schema import Reason

UNIT = 16


def prompt(length: int) -> Entry:
    entry = Entry("new", 1, "", "", length)
    entry.tokens.extend(range(length))
    return entry


def known(common: int, total: int = 1000, lora: str = "") -> Match:
    entry = Entry("old", 0, "", lora, total)
    entry.tokens.extend(range(total))
    return Match(entry, common)


def test_other_lora() -> None:
    causes = explain(prompt(100), HistoryMatch(0, None, known(90, lora="support")), Lookup(0, UNIT, ""))
    assert [(c.reason, c.tokens) for c in causes] == [(Reason.OTHER_LORA, 90), (Reason.NEW_CONTENT, 10)]
    assert causes[0].details["was"] == "support"
    assert explain(prompt(100), HistoryMatch(6, known(100), None), Lookup(96, UNIT, ""))[0].reason is Reason.BLOCK_TAIL


def test_two_causes_in_the_cache() -> None:
    """The sparse group lacks its state up to where the dense one was evicted."""
    groups = [GroupHit(0, "full_attention", 16, True, 64), GroupHit(1, "mamba", 16, False, 32)]
    reasons = {0: Lost(Reason.EVICTED, {"how": "evicted"}), 1: Lost(Reason.STATE_NOT_KEPT)}
    lookup = Lookup(32, UNIT, "", groups, lost=lambda group: reasons[group.index])
    causes = explain(prompt(100), HistoryMatch(6, known(100), None), lookup)
    assert [(c.reason, c.start, c.tokens) for c in causes] == [
        (Reason.STATE_NOT_KEPT, 32, 32),
        (Reason.EVICTED, 64, 36),
    ]


@pytest.mark.parametrize("total", [1, 16, 17, 100, 160])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_causes_cover_what_the_hit_does_not(total: int, share: float) -> None:
    common = int(total * share)
    for hit in range(0, max(total, 1), UNIT):
        found = HistoryMatch(common // UNIT, known(common) if common else None, None)
        groups = [GroupHit(0, "full_attention", 16, True, hit)]
        position = hit
        for cause in explain(prompt(total), found, Lookup(hit, UNIT, "", groups)):
            assert cause.start == position
            assert cause.tokens > 0
            position += cause.tokens
        assert position == total
