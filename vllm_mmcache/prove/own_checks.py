# SPDX-License-Identifier: Apache-2.0
"""The checks of one item on the user's own model: cold against warm, and both against stock vLLM's cold answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from vllm.platforms import current_platform

from vllm_mmcache.exactness.answers import Answer, Inexact, Message, assert_near
from vllm_mmcache.exactness.conversations import one, picture, user
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS
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
    use_where_on,
)
from vllm_mmcache.prove.rig import Rig


def check(
    model: str,
    components: Sequence[str],
    short: bool,
    arguments: Sequence[str],
    stock: Mapping[str, Any] | None,
    image_tokens: int | None,
) -> dict[str, Any]:
    """All checks of an item on the user's own model; stock's answers are `stock`, and this item's where it is stock.

    `image_tokens` is how long a small picture is; it is known after stock.
    """
    overrides: dict[str, Any] = {}
    if alone_on_small_steps(components) and image_tokens is not None:  # one picture fits a step, two don't
        overrides = {"max_num_batched_tokens": image_tokens * 3 // 2, "max_num_seqs": 8}
    rig = own.OwnRig(model, arguments_of(arguments), overrides)
    if stock is not None and rig.images_attend_both_ways and current_platform.is_cpu():
        stock = None  # there its images are causal, which is wrong: docs/image_attention.md
    rows, answers = rows_of(rig, components, short, stock)
    (small,) = rig.image_spans(one(rig, user(picture(0), "What is it?"), max_tokens=1))
    found = {
        "engine": engine_of(rig),
        "rows": [asdict(row) for row in rows],
        "answers": answers,
        "image_tokens": small[1] - small[0],
        **place_of(rig),
    }
    rig.close()
    return found


def rows_of(
    rig: Rig, components: Sequence[str], short: bool, stock: Mapping[str, Any] | None
) -> tuple[list[Row], dict[str, Any]]:
    """Components in force, what they are for, all questions cold and then warm, and the controls.

    Returns the rows, and the cold answers as JSON.
    """
    rows = [row_of(f"{component} is on", partial(assert_on, rig, component)) for component in components]
    rows.append(row_of("nothing else is on", lambda: assert_off(set(ENGINE_COMPONENTS) - set(components))))
    rows += [
        row_of(f"use of {component}", partial(use_where_on, rig, component, USES[component]))
        for component in components
    ]
    asks = own.questions(rig)
    if short:
        asks = {name: asks[name] for name in (own.FIRST, own.AGAIN, own.OTHER)}
    answers = Answers(rig, asks, stock)
    rows += [row_of(f"cold: {name}", partial(answers.ask_cold, name)) for name in asks]
    rig.make_cold()
    rows += [row_of(f"warm: {name}", partial(answers.ask_warm, name)) for name in asks]
    rows.append(row_of("control: hits", answers.assert_hit))
    rows.append(row_of("control: other image", answers.assert_other_image_is_seen))
    rows.append(row_of("control: spoiled KV", lambda: assert_spoiled_kv_is_seen(rig)))
    return rows, {name: own.as_json(answer) for name, answer in answers.cold.items()}


class Answers:
    """Cold and warm answers to the same questions, compared when they are given."""

    def __init__(self, rig: Rig, asks: Mapping[str, Sequence[Message]], stock: Mapping[str, Any] | None) -> None:
        self.rig = rig
        self.asks = asks
        self.stock = None if stock is None else {name: own.from_json(said) for name, said in stock.items()}
        self.cold: dict[str, Answer] = {}
        self.runs: dict[str, list[Answer]] = {}  # the cold one first
        self.warm: dict[str, Answer] = {}

    def ask_cold(self, name: str) -> None:
        """With all caches empty, as stock."""
        if self.stock is not None and name not in self.stock:
            raise NotChecked("stock vLLM gave no answer")
        self.rig.make_cold()
        self.cold[name] = one(self.rig, *self.asks[name])
        assert self.cold[name].num_cached_tokens == 0, "the caches were emptied, and it was a hit"
        self.runs[name] = [self.cold[name], *self.rig.cold_runs(self.cold[name])]
        self._assert_as_stock(name, self.cold[name])

    def ask_warm(self, name: str) -> None:
        """With what the questions before have left in the caches, as cold and as stock."""
        if name not in self.cold:
            raise NotChecked("there is no cold answer")
        self.warm[name] = one(self.rig, *self.asks[name])
        self.rig.assert_as_cold(self.warm[name], self.runs[name])
        self._assert_as_stock(name, self.warm[name])

    def _assert_as_stock(self, name: str, answer: Answer) -> None:
        if self.stock is not None:
            assert_near(answer, [self.stock[name]], self.rig.bound, "stock vLLM's cold run")

    def assert_hit(self) -> None:
        """Control: something warm was compared."""
        assert self.warm[own.AGAIN].num_cached_tokens > 0, "the same request again was no hit"

    def assert_other_image_is_seen(self) -> None:
        """Control: the answer to the same words about another image is out of tolerance."""
        first, other = self.cold[own.FIRST], self.cold[own.OTHER]
        try:
            # As if the prompts were the same: only what was answered is compared.
            assert_near(first, [replace(other, prompt_ids=first.prompt_ids)], self.rig.bound, "another image's")
        except Inexact:
            return
        raise AssertionError("the answer about another image was judged right")
