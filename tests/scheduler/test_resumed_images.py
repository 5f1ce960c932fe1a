# SPDX-License-Identifier: Apache-2.0
"""A preempted request that comes back with a shorter prefix hit has its images still.

The request starts on a hit that covers its image, so vLLM drops the image's inputs; then it is preempted and both the
KV blocks and the encoder output are gone. Stock vLLM dies with "Encoder cache miss" and takes the engine along.
"""

import pickle

import pytest
from vllm.v1.core.sched.output import CachedRequestData

from tests.exactness.engines import EngineConfig, EnginePool
from tests.exactness.expect import assert_exact
from tests.exactness.scenarios import resume_without_blocks
from vllm_mmcache import settings

pytestmark = pytest.mark.engine

CONFIG = EngineConfig("gemma3")


def test_a_resumed_request_has_its_images(pool: EnginePool) -> None:
    rig = pool.get(CONFIG)
    assert_exact(rig, resume_without_blocks(rig))


def test_without_the_swap_the_engine_dies(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, stock's behaviour; a tripwire, too: when this fails, vLLM sends the inputs again."""
    monkeypatch.setattr(settings, "_current", settings.load_settings({"resumed_images": False}))
    with pytest.raises(RuntimeError, match="Encoder cache miss"):
        resume_without_blocks(pool.get(CONFIG))
    pool.close()


def test_what_is_sent_reaches_workers_of_other_processes() -> None:
    """vLLM pickles a step for them; an attribute that it does not know must travel."""
    step = CachedRequestData.make_empty()
    step.mmcache_images = {"request": {0: "feature"}}  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(step)).mmcache_images == {"request": {0: "feature"}}
