# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 under load: no span is ever split, every request finishes, every answer is that of a cold run.

64 requests with shared prefixes and pictures, a small token budget and a KV cache so small that requests are
preempted. The negative control lets the same engine split spans: then it does, and its answers are wrong.
"""

import pytest
from mmcache_tools.harness.engines import LOAD, EngineConfig, EnginePool
from mmcache_tools.harness.tolerances import TOLERANCE

from tests.support.engine_configuration import CHOSEN
from tests.support.sizes import SCALE, scaled
from vllm_mmcache.components.image_spans import hooks_engine
from vllm_mmcache.exactness.answers import Inexact
from vllm_mmcache.exactness.conversations import picture, user
from vllm_mmcache.prove.load import counted, run

pytestmark = pytest.mark.engine

ADJACENT = EngineConfig("gemma3", batched_tokens=96)


def test_no_span_is_split_under_load(pool: EnginePool) -> None:
    rig = pool.get(LOAD)
    before = rig.num_preemptions()
    with counted(rig) as counts:
        answers = [answer for seed in range(1, 1 + SCALE) for answer in run(rig, 64, seed)]
    assert len(answers) == scaled(64)
    assert counts["steps"] > scaled(100)
    assert counts["split"] == 0
    assert rig.num_preemptions() > before, "the KV cache is not small enough for this test to mean anything"
    assert any(answer.num_cached_tokens for answer in answers)
    assert rig.assert_exact(answers) <= TOLERANCE


@pytest.mark.any_engine
def test_without_atomic_spans_answers_are_wrong(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: only vLLM's own guard, which 0.32 has for one of the cases."""
    rig = pool.get(LOAD)
    monkeypatch.setattr(hooks_engine, "whole_spans", lambda start, num_new_tokens, spans: num_new_tokens)
    with counted(rig) as counts:
        answers = run(rig, 64 if CHOSEN.runner == 1 else 24, seed=1)
    assert counts["split"] > 0
    with pytest.raises(Inexact):
        rig.assert_exact(answers)


@pytest.mark.any_engine
def test_adjacent_images_with_a_small_encoder_cache_finish(pool: EnginePool) -> None:
    """Stock 0.32 never finishes this request: the encoder cache holds one image and a half."""
    rig = pool.get(ADJACENT)
    engine = rig.llm.llm_engine
    assert engine.engine_core.engine_core.scheduler.encoder_cache_manager.cache_size < 2 * 64
    for count in (2, 4):
        answers = rig.ask([user(*(picture(i) for i in range(count)), "compare")])
        assert rig.assert_exact(answers) <= TOLERANCE
