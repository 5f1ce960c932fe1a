# SPDX-License-Identifier: Apache-2.0
"""The feature store with the later families, none of which its code names: one run of the tower per image.

Every answer is that of a cold run. The control, features that are spoiled, is in test_tower_runs.
"""

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.zoo import MORE_FAMILIES

from tests.support.towers import Runs
from vllm_mmcache.exactness.conversations import assistant, filler, one, picture, user

pytestmark = pytest.mark.engine

CONFIGS = [pytest.param(EngineConfig(family), id=family) for family in MORE_FAMILIES]


@pytest.mark.parametrize("config", CONFIGS)
def test_one_run_of_the_tower_per_image(pool: EnginePool, config: EngineConfig) -> None:
    rig, runs = pool.get(config), Runs()
    talk = [user(filler(60), picture(530), "and", picture(531, (300, 160)), "Compare.")]
    answers = [one(rig, *talk)]
    assert runs.new() == 2
    rig.forget_all_but_features()
    talk += [assistant(answers[0].text), user("And this one?", picture(532), "Well?")]
    answers.append(one(rig, *talk))
    assert runs.new() == 1
    rig.forget_all_but_features()
    answers += rig.ask(*([user(picture(n), f"Number {n}." + filler(n - 500))] for n in (530, 532, 530)))
    assert runs.new() == 0
    rig.assert_exact(answers)
