# SPDX-License-Identifier: Apache-2.0
"""A preempted request that comes back with a shorter prefix hit has its images still.

The request starts on a hit that covers its image, so vLLM drops the image's inputs; then it is preempted and both the
KV blocks and the encoder output are gone. On model runner V1 stock vLLM dies with "Encoder cache miss" and takes the
engine along; to V2 it sends a resumed request as a new one, with its images.
"""

import pickle
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from vllm.v1.core.sched.output import CachedRequestData

from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.base import status
from vllm_mmcache.prove.checks import resume_without_blocks

pytestmark = pytest.mark.engine

CONFIG = EngineConfig("gemma3")


@pytest.mark.any_engine
def test_a_resumed_request_has_its_images(pool: EnginePool) -> None:
    rig = pool.get(CONFIG)
    rig.assert_exact(resume_without_blocks(rig))


@pytest.mark.any_engine
@pytest.mark.skipif(CHOSEN.runner == 1, reason="how vLLM does it for model runner V2")
@pytest.mark.parametrize("config", [CONFIG, EngineConfig("qwen3-vl")], ids=["gemma3", "qwen3-vl"])
def test_the_second_runner_is_sent_the_images_again(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it needs no hook; a tripwire, too: when this fails, this component has to serve model runner V2 as well."""
    rig = pool.get(config)
    assert not status.is_on("resumed_images")
    scheduler = rig.llm.llm_engine.engine_core.engine_core.scheduler
    sent: list[int] = []
    schedule = scheduler.schedule

    def see(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        # Beside what the positions of Qwen's tokens are calculated from, which is always sent.
        sent.extend(len(f.data or ()) for new in step.scheduled_new_reqs for f in new.mm_features)
        return step

    monkeypatch.setattr(scheduler, "schedule", see)
    answers = resume_without_blocks(rig)
    cold, hit, resumed = sent
    assert hit < cold == resumed
    rig.assert_exact(answers)


@pytest.mark.skipif(CHOSEN.runner != 1, reason="model runner V2 is sent a resumed request anew")
def test_without_the_swap_the_engine_dies(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, stock's behaviour; a tripwire, too: when this fails, vLLM sends the inputs again to V1."""
    rig = pool.get(CONFIG)
    monkeypatch.setitem(status._is_on, "resumed_images", False)
    with pytest.raises(RuntimeError, match="Encoder cache miss"):
        resume_without_blocks(rig)
    pool.close()


def test_what_is_sent_reaches_workers_of_other_processes() -> None:
    """vLLM pickles a step for them; an attribute that it does not know must travel."""
    step = CachedRequestData.make_empty()
    step.mmcache_images = {"request": {0: "feature"}}
    assert pickle.loads(pickle.dumps(step)).mmcache_images == {"request": {0: "feature"}}
