# SPDX-License-Identifier: Apache-2.0
"""The checks of one item on the user's own model: cold against warm, and both against stock vLLM's cold answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from vllm.platforms import current_platform

from vllm_mmcache.prove import own
from vllm_mmcache.prove.checks import (
    USES,
    NotChecked,
    Row,
    alone_on_small_steps,
    arguments_of,
    assert_off,
    assert_on,
    assert_spoiled_kv_is_seen,
    engine_of,
    place_of,
    row_of,
)
from vllm_mmcache.prove.engines import Answer, EnginePool, Rig
from vllm_mmcache.prove.expect import Inexact, assert_equals_answer, tolerance_of
from vllm_mmcache.prove.scenarios import one, picture, user
from vllm_mmcache.upstream.proven import ENGINE_ROOMS


def check(
    pool: EnginePool,
    model: str,
    rooms: Sequence[str],
    short: bool,
    arguments: Sequence[str],
    stock: Mapping[str, Any] | None,
    image_tokens: int | None,
) -> dict[str, Any]:
    """All checks of an item on the user's own model; stock's answers are `stock`, and this item's where it is stock.

    `image_tokens` is how long a small picture is; it is known after stock.
    """
    overrides: dict[str, Any] = {}
    if alone_on_small_steps(rooms) and image_tokens is not None:  # one picture fits a step, two don't
        overrides = {"max_num_batched_tokens": image_tokens * 3 // 2, "max_num_seqs": 8}
    pool.rig = rig = own.OwnRig(model, arguments_of(arguments, own=True), overrides)
    if stock is not None and rig.images_attend_both_ways and current_platform.is_cpu():
        stock = None  # there its images are causal, which is wrong: docs/image_attention.md
    rows, answers = rows_of(rig, rooms, short, stock)
    (small,) = rig.image_spans(one(rig, user(picture(0), "What is it?"), max_tokens=1))
    return {
        "engine": engine_of(rig),
        "rows": [asdict(row) for row in rows],
        "answers": answers,
        "image_tokens": small[1] - small[0],
        **place_of(rig),
    }


def rows_of(
    rig: Rig, rooms: Sequence[str], short: bool, stock: Mapping[str, Any] | None
) -> tuple[list[Row], dict[str, Any]]:
    """As those of a zoo model, without an oracle: cold answers are stock's, warm ones are stock's and the cold ones.

    Returns the rows, and the cold answers as JSON.
    """
    tolerance = tolerance_of(rig)
    rows = [row_of(f"{room} is on", partial(assert_on, rig, room)) for room in rooms]
    rows.append(row_of("nothing else is on", lambda: assert_off(set(ENGINE_ROOMS) - set(rooms))))
    rows += [row_of(f"use of {room}", partial(USES[room], rig)) for room in rooms]
    asks = own.questions(rig)
    if short:
        asks = {name: asks[name] for name in (own.FIRST, own.AGAIN, own.OTHER)}
    cold: dict[str, Answer] = {}
    warm: dict[str, Answer] = {}

    def ask_cold(name: str) -> None:
        if stock is not None and name not in stock:
            raise NotChecked("stock vLLM gave no answer")
        rig.make_cold()
        cold[name] = one(rig, *asks[name])
        assert cold[name].num_cached_tokens == 0, "the caches were emptied, and it was a hit"
        if stock is not None:
            assert_equals_answer(cold[name], own.from_json(stock[name]), tolerance, "stock vLLM's cold run")

    def ask_warm(name: str) -> None:
        if name not in cold:
            raise NotChecked("there is no cold answer")
        warm[name] = one(rig, *asks[name])
        assert_equals_answer(warm[name], cold[name], tolerance, "the own cold run")
        if stock is not None:
            assert_equals_answer(warm[name], own.from_json(stock[name]), tolerance, "stock vLLM's cold run")

    def assert_hit() -> None:
        assert warm[own.AGAIN].num_cached_tokens > 0, "the same request again was no hit, so nothing warm was compared"

    rows += [row_of(f"cold: {name}", partial(ask_cold, name)) for name in asks]
    rig.make_cold()
    rows += [row_of(f"warm: {name}", partial(ask_warm, name)) for name in asks]
    rows.append(row_of("control: hits", assert_hit))

    def assert_other_is_seen() -> None:
        # The same words about another picture: only the picture is compared.
        apart = replace(cold[own.OTHER], prompt_ids=cold[own.FIRST].prompt_ids)
        try:
            assert_equals_answer(cold[own.FIRST], apart, tolerance, "that about another image")
        except Inexact:
            return
        raise AssertionError("the answer about another image was judged right")

    rows.append(row_of("control: other image", assert_other_is_seen))
    rows.append(row_of("control: spoiled KV", lambda: assert_spoiled_kv_is_seen(rig)))
    return rows, {name: own.as_json(answer) for name, answer in cold.items()}
