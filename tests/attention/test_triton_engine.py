# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and Gemma 4 through vLLM's Triton attention, on model runner V2, as engines on CUDA have it.

Three requests with adjacent images share steps of 96 tokens and a KV cache that is too small for them, so images are
chunk boundaries, prefix hits end inside them, and requests are preempted. The negative control is vLLM without the
scheduler's part of image_spans: it splits images, in spite of its own --disable-chunked-mm-input, and is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.attention.triton_backend import ARGUMENTS, granted
from tests.exactness.engines import Answer, EngineConfig, EnginePool, Rig
from tests.exactness.expect import Inexact, assert_exact
from tests.exactness.scenarios import filler, picture, user
from tests.scheduler.load import counted
from vllm_mmcache import settings

pytestmark = [pytest.mark.engine, pytest.mark.interpreter]

FAMILIES = ["gemma3", "gemma4"]
CONFIGS = [EngineConfig(family, batched_tokens=96, num_blocks=50, max_tokens=256, more=ARGUMENTS) for family in FAMILIES]
every_family = pytest.mark.parametrize("config", CONFIGS, ids=FAMILIES)


@pytest.fixture
def engine(pool: EnginePool) -> Iterator[Any]:
    """An engine of the pool whose attention is vLLM's Triton backend."""

    def get(config: EngineConfig) -> Rig:
        rig = pool.get(config)
        builders = {type(group.get_metadata_builder()).__name__ for groups in rig.runner.attn_groups for group in groups}
        assert builders == {"TritonAttentionMetadataBuilder"}
        return rig

    with granted():
        yield get


def ask(rig: Rig) -> list[Answer]:
    """Three at once, one of them again, and in another order."""
    first = [user(picture(60), picture(61), "Compare.")]
    others = [user(picture(62), "What is it?" + filler(12))], [user("See" + filler(20), picture(60), picture(62), "So?")]
    answers = rig.ask(first, *others, max_tokens=3)
    answers += rig.ask(first, max_tokens=3)
    answers += rig.ask([user(picture(61), picture(60), "Compare.")], max_tokens=3)
    return answers


@every_family
def test_equals_cold_run(engine: Any, config: EngineConfig) -> None:
    rig = engine(config)
    before = rig.num_preemptions()
    with counted(rig) as counts:
        answers = ask(rig)
    assert counts["split"] == 0
    assert rig.num_preemptions() > before
    again = answers[3]
    assert any(first < again.num_cached_tokens < end for first, end in rig.image_spans(again)), again.num_cached_tokens
    delta = assert_exact(rig, answers)
    print(f"max |delta logprob| {delta:.1e}")  # shown by pytest -rP


@every_family
def test_vllm_alone_splits_images_and_is_wrong(engine: Any, config: EngineConfig) -> None:
    """Negative control."""
    rig = engine(config)
    before = settings.current()
    settings.use(before.model_copy(update={"image_spans": False}))
    try:
        with counted(rig) as counts:
            answers = ask(rig)
    finally:
        settings.use(before)
    assert counts["split"] > 0
    with pytest.raises(Inexact):
        assert_exact(rig, answers)
