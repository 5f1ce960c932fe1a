# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows or Mamba layers: which KV group kept no state, and what the others had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from tests.support.observing import Observed, observing, picture, user, words
from vllm_mmcache.base import status
from vllm_mmcache.components.observe.record.schema import Reason

pytestmark = pytest.mark.engine

SPARSE = {"gemma3": "sliding_window", "qwen3.5": "mamba"}


@pytest.fixture(params=SPARSE, scope="module")
def ask(request: pytest.FixtureRequest, pool: EnginePool) -> Iterator[Observed]:
    with observing(pool, EngineConfig(request.param)) as engine:
        yield engine


@pytest.mark.parametrize("checkpoints", [False, True])
def test_state_not_kept(ask: Observed, checkpoints: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ask.rig.make_cold()
    monkeypatch.setitem(status._is_on, "image_checkpoints", checkpoints)
    shared = ["Look:" + words(300), picture("veto"), picture("veto too")]
    ask.chat(user(*shared, "What is it?" + words(250)))
    second = ask.chat(user(*shared, "And why is that so?" + words(250, 7)))
    vetoed = [miss for miss in second.record.misses if miss.reason is Reason.STATE_NOT_KEPT]
    assert bool(vetoed) is not checkpoints, second.record
    assert (second.cached > 0) is checkpoints
    if not checkpoints:
        (miss,) = vetoed
        assert miss.details["kind"] == SPARSE[ask.rig.config.family]
        groups = {group.kind: group for group in second.record.groups}
        assert groups[SPARSE[ask.rig.config.family]].vetoed
        assert groups["full_attention"].hit_tokens == miss.details["others_hit_tokens"]
        assert groups["full_attention"].hit_tokens > second.cached
        assert not groups["full_attention"].vetoed
        image = second.segment("image")
        assert second.record.misses[image.miss or 0].reason is Reason.STATE_NOT_KEPT


def test_a_reset_is_no_veto(ask: Observed) -> None:
    ask.rig.make_cold()
    talk = user("Look:" + words(300), picture("veto"), "What is it?" + words(250))
    ask.chat(talk)
    assert ask.chat(talk).reasons in ([Reason.BLOCK_TAIL], [Reason.LAST_TOKEN])
    assert ask.rig.llm.reset_prefix_cache()
    assert ask.chat(talk).reasons[0] is Reason.EVICTED
