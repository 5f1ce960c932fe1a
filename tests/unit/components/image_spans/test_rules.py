# SPDX-License-Identifier: Apache-2.0
"""What classes say of images that attend both ways: with the mask of the reference form it is Transformers' own."""

import importlib
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from tests.unit.components.image_spans.test_attention_spans import Span, layouts
from vllm_mmcache.base import settings
from vllm_mmcache.base.errors import CausalImages
from vllm_mmcache.components.image_spans import hooks_worker, rules
from vllm_mmcache.components.image_spans.hooks_worker import check_model
from vllm_mmcache.models.facts import FACTS, Gemma3, Gemma4, PaliGemma
from vllm_mmcache.models.protocol import ImageModel
from vllm_mmcache.reference_attention.naive import allowed

pytestmark = pytest.mark.answers

KINDS = ("full_attention", "sliding_attention")
BOTH_WAYS: dict[str, ImageModel] = {"gemma3": Gemma3(), "gemma4": Gemma4()}


def of_transformers(model_type: str, length: int, spans: list[Span], window: int) -> dict[str, torch.Tensor]:
    """Transformers' masks of a prompt with images at these spans, by kind of layer; bool (length, length)."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    config = AutoConfig.for_model(
        f"{model_type}_text", sliding_window=window, num_hidden_layers=2, layer_types=[*KINDS]
    )
    if model_type == "gemma4":
        config.use_bidirectional_attention = "vision"
    config._attn_implementation = "eager"
    ids = torch.full((1, length), -1)
    for number, (first, last) in enumerate(spans):
        ids[0, first : last + 1] = number
    masks = module.create_masks_for_vision_model(
        config=config,
        inputs_embeds=torch.zeros(1, length, 8),
        attention_mask=torch.ones(1, length, dtype=torch.bool),
        past_key_values=None,
        position_ids=torch.arange(length)[None],
        block_sequence_ids=ids,
    )
    return {kind: masks[kind][0, 0] == 0 for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", list(BOTH_WAYS))
@hypothesis.settings(deadline=None)  # the first call imports the model
@given(layout=layouts(), window=st.integers(2, 12))
def test_table_and_mask_are_those_of_transformers(model_type: str, layout: tuple[int, list[Span]], window: int) -> None:
    length, spans = layout
    masks = of_transformers(model_type, length, spans, window)
    for kind in KINDS:
        sliding = kind == "sliding_attention"
        seen = spans if rules.are_bidirectional(BOTH_WAYS[model_type], None, sliding) else []
        assert torch.equal(masks[kind], allowed(0, length, seen, window if sliding else 0)), kind


@pytest.mark.parametrize(("model_type", "other"), [("gemma3", "gemma4"), ("gemma4", "gemma3")])
def test_the_other_model_has_another_mask(model_type: str, other: str) -> None:
    """Negative control: full layers tell the two apart."""
    masks = of_transformers(model_type, 8, [(2, 5)], 4)
    seen: list[Span] = [(2, 5)] if rules.are_bidirectional(BOTH_WAYS[other], None, False) else []
    assert not torch.equal(masks["full_attention"], allowed(0, 8, seen, 0))


def test_a_model_whose_class_says_nothing_has_no_images_both_ways() -> None:
    assert not rules.are_bidirectional(None, None, False)
    assert not rules.are_bidirectional(None, None, True)
    assert {name for name, images in FACTS.items() if rules.are_bidirectional(images, None, True)} == {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
    }


def model(model_type: str, tokens: int = 0, window: int | None = None, marked: bool = True) -> SimpleNamespace:
    """What the guard reads of vLLM's ModelConfig."""
    return SimpleNamespace(
        is_mm_prefix_lm=marked,
        hf_config=SimpleNamespace(model_type=model_type, mm_tokens_per_image=tokens),
        hf_text_config=SimpleNamespace(sliding_window=window),
    )


@pytest.mark.parametrize("model_type", ["bagel", "gemma4_unified", "molmo2", "moondream3"])
def test_unknown_models_are_refused(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks_worker, "images_of", lambda model_config: None)
    with pytest.raises(CausalImages, match=rf"{model_type}.* does not say in which layers .*ALLOW_CAUSAL_IMAGES=1"):
        check_model(model(model_type))


def refusal(model_type: str, images: ImageModel, **more: Any) -> str:
    return rules.refusal(model(model_type, **more), images, on_cpu=True) or ""


def test_paligemma_is_refused_with_its_own_reason() -> None:
    assert "whole prompt attends both ways" in refusal("paligemma", PaliGemma())


def test_an_image_must_fit_the_window_where_the_runner_drops_it() -> None:
    assert not refusal("gemma3", Gemma3(), tokens=64, window=64)
    assert "an image has 65 tokens" in refusal("gemma3", Gemma3(), tokens=65, window=64)


def test_what_is_served_or_not_marked_passes() -> None:
    assert not refusal("gemma4", Gemma4(), window=16)
    assert not refusal("paligemma", PaliGemma(), marked=False)  # a text-only deployment
    check_model(model("qwen3_vl", marked=False))


def test_the_setting_lets_everything_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.load_settings({"allow_causal_images": True}))
    check_model(model("paligemma"))


@pytest.mark.parametrize(("model_type", "state"), [("gemma3", None), ("deepseek_v4", "off")])
def test_a_model_whose_spans_are_others(model_type: str, state: str | None) -> None:
    model_config = SimpleNamespace(is_mm_prefix_lm=True, hf_config=SimpleNamespace(model_type=model_type))
    found = rules.state_in(SimpleNamespace(model_config=model_config))
    assert (found.state if found is not None else None) == state
