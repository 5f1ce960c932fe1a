# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 on real engines: images both ways in sliding layers alone, and within the window, also where it is shorter.

An image has 64 tokens. Each engine is asked for images after text, adjacent images, images as a prefix hit and images
in small chunks, and each answer is judged against Transformers on the cold prompt.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.tolerances import TOLERANCE
from mmcache_tools.zoo import BY_NAME, ZooOptions, build_cached
from packaging.version import Version

from tests.engine.exactness.measure import judge
from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.base import settings
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.exactness.answers import Answer, Inexact
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.reference_attention import naive, vllm_layers

pytestmark = pytest.mark.engine

SHORT, LONG = 16, 128  # windows in tokens, and an image of 64
WRONG = 100 * TOLERANCE
# vLLM 0.32's second model runner forgets that this model clamps images to the window, and leaves longer ones out.
LEFT_OUT = CHOSEN.runner == 2 and Version(vllm_version()) < Version("0.33")
in_spans = pytest.mark.skipif(LEFT_OUT, reason="such images are refused: vLLM 0.32 leaves them out of the spans on V2")


@pytest.fixture
def start(pool: EnginePool, tmp_path: Path) -> Iterator[Any]:
    """Starts an engine with a window; it is closed at the end, and no other is alive."""
    rigs: list[ZooRig] = []

    def make(window: int, **arguments: Any) -> ZooRig:
        pool.close()
        model = build_cached("gemma4", tmp_path, options=ZooOptions(sliding_window=window))
        rigs.append(ZooRig(EngineConfig("gemma4", **arguments), model))
        CHOSEN.check(rigs[-1])
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def ask(rig: ZooRig) -> list[Answer]:
    """Answers cold, from a prefix that ends at, before and after an image, and several at once."""
    one = [user("See" + filler(30), picture(60), "What is it?" + filler(20))]
    two = [user(picture(61), picture(62), "Which is larger?" + filler(12))]
    later = [*one, {"role": "assistant", "content": "a cup"}, user("And this?", picture(63, (300, 160)), "Again?")]
    answers = rig.ask(one, max_tokens=6)
    answers += rig.ask(one, two, later, max_tokens=6)
    assert any(answer.num_cached_tokens for answer in answers[1:]), "nothing came from the prefix cache"
    return answers


def builders(rig: ZooRig) -> list[Any]:
    """The metadata builder of each group of layers."""
    return [group.get_metadata_builder() for groups in rig.runner.attn_groups for group in groups]


def windows(*tokens: int) -> Any:
    """Windows shorter than an image need an engine that keeps such images in the spans."""
    return pytest.mark.parametrize("window", [pytest.param(w, marks=in_spans if w < 64 else ()) for w in tokens])


@windows(SHORT, 32, LONG)
def test_windows(start: Any, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms are Transformers'; in the fast form images longer than the window are computed again."""
    rig = start(window)
    rig.assert_exact(ask(rig))
    with vllm_layers.computed_naively(rig.runner):
        rig.make_cold()
        rig.assert_exact(ask(rig))


@windows(SHORT, LONG)
def test_small_steps(start: Any, window: int) -> None:
    """A step holds one image and a little text."""
    rig = start(window, batched_tokens=80)
    rig.assert_exact(ask(rig))


def test_rule_ignored_in_full_layers(start: Any) -> None:
    """Negative control: with images both ways in full layers, too, as in Gemma 3, answers are wrong."""
    rig = start(LONG)
    full = [builder for builder in builders(rig) if builder.window_size == -1]
    assert [(builder.has_images, len(builder.causal_layers)) for builder in full] == [(False, 2)]
    full[0].has_images, full[0].causal_layers = True, frozenset()
    answers = ask(rig)
    with pytest.raises(Inexact):
        rig.assert_exact(answers)
    assert max(delta for delta, _ in judge(rig, answers)) > WRONG


@pytest.mark.skipif(not LEFT_OUT, reason="they are exact here")
def test_images_longer_than_the_window_are_refused(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And why: run all the same, answers are wrong."""
    rig = start(SHORT)
    with pytest.raises(ValueError, match=r"has 64 tokens .* sliding_window, .*, is 16, needed are 64"):
        ask(rig)
    monkeypatch.setattr(settings, "_current", settings.current().model_copy(update={"allow_causal_images": True}))
    assert max(delta for delta, _ in judge(rig, ask(rig))) > WRONG


@in_spans
def test_right_side_of_a_short_window_ignored(start: Any) -> None:
    """Negative control: with one pass of the kernel, which bounds a row on both sides, answers are wrong."""
    rig = start(SHORT)
    for builder in builders(rig):
        builder.image_window = None
    assert max(delta for delta, _ in judge(rig, ask(rig))) > WRONG


@in_spans
def test_window_ignored_within_an_image(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with (causal and in the window) or of the same image, answers are wrong."""
    clamped = naive.allowed_at

    def unclamped(positions: Any, num_keys: int, spans: Any, window: int) -> Any:
        image = clamped(positions, num_keys, spans, 0) & ~clamped(positions, num_keys, [], 0)
        for first, last in spans:
            image[(positions >= first) & (positions <= last), first : last + 1] = True
        return clamped(positions, num_keys, [], window) | image

    monkeypatch.setattr(vllm_layers, "allowed_at", unclamped)
    rig = start(SHORT)
    with vllm_layers.computed_naively(rig.runner):
        assert max(delta for delta, _ in judge(rig, ask(rig))) > WRONG


@in_spans
def test_one_group_with_both_kinds_of_layers(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of one size and no hybrid KV cache: sliding and full layers share metadata, and each has its own rule."""
    family = BY_NAME["gemma4"]

    def config(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
        made = family.config(ids, vocab_size, options)
        same = {"global_head_dim": 64, "attention_k_eq_v": False, "num_global_key_value_heads": None}
        return made | {"text_config": made["text_config"] | same}

    monkeypatch.setitem(BY_NAME, "gemma4", dataclasses.replace(family, config=config))
    rig = start(SHORT, more=(("disable_hybrid_kv_cache_manager", True),))
    (builder,) = builders(rig)
    assert (len(builder.layer_names), len(builder.causal_layers), builder.image_window) == (5, 2, SHORT)
    rig.assert_exact(ask(rig))
