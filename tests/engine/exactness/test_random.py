# SPDX-License-Identifier: Apache-2.0
"""Random load on a tiny KV cache: every answer is that of a cold run.

Gemma 3 and Qwen3.5 have the same load in image_checkpoints. CI runs one family, `make soak` all of them and more.
"""

from __future__ import annotations

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from tests.engine.exactness.mixed import ask_mixed, assert_all_cold
from tests.support.sizes import SCALE, scaled

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

FAMILIES = ("qwen3-vl",) if SCALE == 1 else ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
TINY = [EngineConfig(family, num_blocks=34, num_seqs=8, max_tokens=1024) for family in FAMILIES]


@pytest.mark.parametrize("config", TINY, ids=FAMILIES)
def test_mixed_requests(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    preempted = rig.num_preemptions()
    answers = ask_mixed(rig, scaled(10), (224, 224))
    assert len(answers) == scaled(60)
    assert rig.num_preemptions() > preempted, "the KV cache is not small enough for this test to mean anything"
    assert any(answer.num_cached_tokens for answer in answers)
    assert_all_cold(rig, answers)
