# SPDX-License-Identifier: Apache-2.0
"""Compares a few rows of real steps with the naive attention: what a rank saw, and what all ranks saw. Worker process.

A request of the trial runs alone, so a step has one request's rows. Of each layer's step a few are compared: the first,
the last, and the first and middle ones of images, which see most of what comes after them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_mmcache.base.errors import one_line
from vllm_mmcache.reference_attention.naive import Span
from vllm_mmcache.reference_attention.vllm_layers import CannotCompute, LayerStep, ReferenceLayers, Request

MOST_ROWS = 6
"""Of a step, in each layer."""
BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3}
BOUND_IN_LOW_PRECISION = 0.05
"""Allowed differences, as shares of the largest element: a kernel adds up in another order, and rounds."""

DECODE, PICTURE, AFTER_HIT, PREFILL = "decode", "picture", "after a cached prefix", "prefill"
KINDS = (DECODE, PICTURE, AFTER_HIT, PREFILL)


class Comparison:
    """Compares steps of a model runner until `end`. Raises nothing within a step."""

    def __init__(self, runner: Any, spans: Sequence[Span]) -> None:
        """spans: of the images of the request that runs alone. Raises: what layers of another kind do."""
        self._layers = ReferenceLayers(runner)
        self._layers.spans = tuple(spans)
        self._rows = dict.fromkeys(KINDS, 0)
        self._wrong: dict[str, str] = {}
        self._unread = ""
        try:
            self._layers.watch(self._compare)
        except BaseException:
            self._layers.leave()
            raise

    def end(self) -> dict[str, Any]:
        """Leave the layers as they were. Returns what was seen, of plain values, for `merged`."""
        self._layers.leave()
        return {"rows": self._rows, "wrong": self._wrong, "unread": self._unread}

    def _compare(self, step: LayerStep) -> None:
        try:
            if len(step.requests) == 1:
                self._compare_rows(step, step.requests[0])
        except CannotCompute as reason:
            self._unread = f"layer {step.layer.layer_name}: {reason}"
        except Exception as error:  # must not end the step, which is the engine's
            self._unread = f"layer {step.layer.layer_name}: {one_line(error)}"

    def _compare_rows(self, step: LayerStep, request: Request) -> None:
        positions = positions_to_compare(request)
        expected = self._layers.rows(step, request, positions).float()
        at = torch.tensor(positions, device=step.output.device) - request.start + request.first_row
        found = step.output[at].float()
        far = (found - expected).abs().flatten(1).amax(1) / expected.abs().max().clamp_min(1e-30)
        bound = BOUNDS.get(step.output.dtype, BOUND_IN_LOW_PRECISION)
        for position, difference in zip(positions, far.tolist(), strict=True):
            kind = kind_of(request, position)
            self._rows[kind] += 1
            if not difference <= bound and kind not in self._wrong:  # also what is not a number
                self._wrong[kind] = f"layer {step.layer.layer_name}, token {position}, by {difference:.2g}"


def positions_to_compare(request: Request) -> list[int]:
    """Which of a request's rows in a step are compared, as positions in its sequence."""
    found = [request.start, request.end - 1]
    for first, last in request.spans:
        found += [max(first, request.start), (first + last) // 2]
    inside = dict.fromkeys(position for position in found if request.start <= position < request.end)
    return list(inside)[:MOST_ROWS]


def kind_of(request: Request, position: int) -> str:
    """What a row shows, one of KINDS."""
    if request.end - request.start == 1 and request.start:
        return DECODE
    if any(first <= position <= last for first, last in request.spans):
        return PICTURE
    return AFTER_HIT if request.start else PREFILL


def unread(reason: str) -> dict[str, Any]:
    """What is seen where nothing could be compared, for `merged`."""
    return {"rows": dict.fromkeys(KINDS, 0), "wrong": {}, "unread": reason}


def merged(seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks saw, or one rank in several requests: rows added up, and the first of what was wrong."""
    wrong: dict[str, str] = {}
    for one in seen:
        wrong = {**one["wrong"], **wrong}
    return {
        "rows": {kind: sum(one["rows"][kind] for one in seen) for kind in KINDS},
        "wrong": wrong,
        "unread": next((one["unread"] for one in seen if one["unread"]), ""),
    }
