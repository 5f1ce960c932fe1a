# SPDX-License-Identifier: Apache-2.0
"""The vision tower runs once per image on real engines, and every answer is that of a cold run.

Negative controls: a swapped image runs the tower and gets its own answer, and with the room off the tower runs as
often as on stock. Positive proof that stored features are what the answer comes from: spoiled ones spoil it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exactness.engines import EngineConfig, EnginePool, Rig
from tests.exactness.expect import assert_exact
from tests.exactness.scenarios import assistant, filler, one, picture, user
from vllm_mmcache import events, settings
from vllm_mmcache.zoo import FAMILIES

pytestmark = pytest.mark.engine

CONFIGS = [pytest.param(EngineConfig(family), id=family) for family in FAMILIES]
QWEN = EngineConfig("qwen3-vl")

Put = Callable[..., None]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts settings in force for one test."""

    def put_in_force(**values: object) -> None:
        monkeypatch.setattr(settings, "_current", settings.load_settings(values))

    return put_in_force


@pytest.fixture(autouse=True)
def trapped(put: Put) -> None:
    """No test here may run the tower for an image that is stored."""
    put(tower_trap=True)


def tower_images() -> int:
    """Images that the tower ran for since the process started."""
    return int(events.totals().get("tower_images", 0))


def forget_all_but_features(rig: Rig) -> None:
    """As after enough other requests: KV blocks and encoder cache are gone."""
    rig.make_cold()


@pytest.mark.parametrize("config", CONFIGS)
def test_the_tower_runs_once_per_image(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    image = picture(500)
    before = tower_images()
    first = one(rig, user(filler(60), image, "What is it?"))
    assert tower_images() - before == 1
    forget_all_but_features(rig)
    second = one(rig, user(filler(40), image, "And what is at its edge?"))
    assert tower_images() - before == 1
    assert_exact(rig, [first, second])
