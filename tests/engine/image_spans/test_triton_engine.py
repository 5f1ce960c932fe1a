# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and Gemma 4 through vLLM's Triton attention, on model runner V2, as engines on CUDA have it.

Requests with adjacent images share steps of 96 tokens, so chunks end at images, and prefix hits end inside them. The
negative control is vLLM without the plugin's rule for chunks: it splits images, in spite of its own
--disable-chunked-mm-input, and is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from packaging.version import Version

from tests.engine.exactness.measure import judge
from tests.engine.image_spans.triton_backend import ARGUMENTS, granted
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.image_spans import hooks_engine
from vllm_mmcache.exactness.answers import Answer, Inexact
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.prove.load import counted

pytestmark = [pytest.mark.engine, pytest.mark.interpreter]

FROM_0_33 = Version(vllm_version()) >= Version("0.33")
GEMMA3, GEMMA4 = (
    EngineConfig(family, batched_tokens=96, max_tokens=256, more=ARGUMENTS) for family in ("gemma3", "gemma4")
)


@pytest.fixture
def engine(pool: EnginePool) -> Iterator[Any]:
    """An engine of the pool whose attention is vLLM's Triton backend."""

    def get(config: EngineConfig) -> ZooRig:
        rig = pool.get(config)
        groups = [group for groups in rig.runner.attn_groups for group in groups]
        assert {group.backend.get_name() for group in groups} == {"TRITON_ATTN"}
        return rig

    with granted():
        yield get


def three_at_once(rig: ZooRig) -> list[Answer]:
    """Adjacent images, and one of them after text of two lengths."""
    adjacent = [user(picture(60), picture(61), "Compare.")]
    later = ([user(filler(n), picture(61), "What is it?" + filler(12))] for n in (3, 24))
    return rig.ask(adjacent, *later, max_tokens=2)


@pytest.mark.parametrize("config", [GEMMA3, GEMMA4], ids=["gemma3", "gemma4"])
def test_equals_cold_run(engine: Any, config: EngineConfig) -> None:
    rig = engine(config)
    with counted(rig) as counts:
        answers = three_at_once(rig)
    assert counts["split"] == 0
    again = rig.ask([user(picture(60), picture(61), "Compare.")], max_tokens=2)[0]
    assert any(first < again.num_cached_tokens < end for first, end in rig.image_spans(again)), again.num_cached_tokens
    delta = rig.assert_exact([*answers, again])
    print(f"max |delta logprob| {delta:.1e}")  # shown by pytest -rP


@pytest.mark.skipif(FROM_0_33, reason="there, a step that begins on an image, too, waits")
@pytest.mark.parametrize("config", [GEMMA3], ids=["gemma3"])
def test_vllm_alone_splits_images_and_is_wrong(
    engine: Any, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what is left is vLLM's own --disable-chunked-mm-input."""
    rig = engine(config)
    monkeypatch.setattr(hooks_engine, "whole_spans", lambda start, num_new_tokens, spans: num_new_tokens)
    with counted(rig) as counts:
        answers = three_at_once(rig)
    assert counts["split"] > 0
    print(f"split {counts['split']}, max |delta logprob| {max(delta for delta, _ in judge(rig, answers)):.1e}")
    with pytest.raises(Inexact):
        rig.assert_exact(answers)
