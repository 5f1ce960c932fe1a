# SPDX-License-Identifier: Apache-2.0
"""The other families: every answer is that of a cold run. CI runs a short form of each, `make matrix` the whole.

`make matrix` sets TEST_MATRIX=1.
"""

from __future__ import annotations

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.harness.oracle import assert_detects
from mmcache_tools.harness.scenarios import (
    MAIN,
    Scenario,
    other_image_after_cached,
    same_again,
    swapped_image,
    text_turn,
)
from mmcache_tools.zoo import MORE_FAMILIES

from tests.support.sizes import WHOLE
from vllm_mmcache.exactness.conversations import filler, picture, user

pytestmark = pytest.mark.engine

SHORT: tuple[Scenario, ...] = (same_again, text_turn, other_image_after_cached, swapped_image)

CONFIGS = [EngineConfig(family) for family in MORE_FAMILIES]
CASES = [
    pytest.param(config, scenario, id=f"{config.family}-{scenario.__name__}")
    for config in CONFIGS
    for scenario in (MAIN if WHOLE else SHORT)
]


@pytest.mark.parametrize(("config", "scenario"), CASES)
def test_equals_cold_run(pool: EnginePool, config: EngineConfig, scenario: Scenario) -> None:
    rig = pool.get(config)
    delta = rig.assert_exact(scenario(rig))
    print(f"max |delta logprob| {delta:.1e}")  # shown by pytest -rP


@pytest.mark.parametrize("config", CONFIGS, ids=MORE_FAMILIES)
def test_wrong_picture_is_detected(pool: EnginePool, config: EngineConfig) -> None:
    """Negative control: an answer about one picture, judged as one about another, is far out of tolerance."""
    rig = pool.get(config)
    answers = rig.ask(*([user(filler(60), picture(n), "What is in this picture?")] for n in (30, 31)))
    rig.assert_exact(answers)
    assert_detects(answers[0], answers[1], rig.oracle)
