# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step are compared, what they show, and what several ranks have seen."""

from typing import Any

import torch

from vllm_mmcache.reference_attention.comparison import (
    AFTER_HIT,
    DECODE,
    KINDS,
    MOST_ROWS,
    PICTURE,
    PREFILL,
    kind_of,
    merged,
    positions_to_compare,
)
from vllm_mmcache.reference_attention.vllm_layers import Request


def request(start: int, end: int, *spans: tuple[int, int]) -> Request:
    return Request(0, start, end, spans, torch.zeros(4, dtype=torch.int32))


def test_positions() -> None:
    assert positions_to_compare(request(0, 100, (10, 30), (40, 60))) == [0, 99, 10, 20, 40, 50]
    assert positions_to_compare(request(15, 45, (10, 30), (40, 60))) == [15, 44, 20, 40], "those of the step alone"
    assert positions_to_compare(request(99, 100, (10, 30))) == [99]
    many = positions_to_compare(request(0, 400, *((n, n + 8) for n in range(10, 300, 20))))
    assert len(many) == MOST_ROWS


def test_kinds() -> None:
    assert kind_of(request(0, 100, (10, 30)), 20) == PICTURE
    assert kind_of(request(0, 100, (10, 30)), 31) == PREFILL
    assert kind_of(request(8, 100, (10, 30)), 31) == AFTER_HIT
    assert kind_of(request(99, 100, (10, 30)), 99) == DECODE
    assert kind_of(request(0, 1), 0) == PREFILL


def test_what_ranks_saw_is_put_together() -> None:
    rows = dict.fromkeys(KINDS, 1)
    seen: list[dict[str, Any]] = [
        {"rows": rows, "wrong": {}, "unread": ""},
        {"rows": rows, "wrong": {DECODE: "layer 1"}, "unread": "sinks"},
        {"rows": rows, "wrong": {DECODE: "layer 2", PICTURE: "layer 3"}, "unread": ""},
    ]
    assert merged(seen) == {
        "rows": dict.fromkeys(KINDS, 3),
        "wrong": {DECODE: "layer 1", PICTURE: "layer 3"},
        "unread": "sinks",
    }
    assert merged([]) == {"rows": dict.fromkeys(KINDS, 0), "wrong": {}, "unread": ""}
