# SPDX-License-Identifier: Apache-2.0
"""A preempted request that comes back with a shorter prefix hit has its images still.

The request starts on a hit that covers its image, so vLLM drops the image's inputs; then it is preempted and both the
KV blocks and the encoder output are gone. Stock vLLM dies with "Encoder cache miss" and takes the engine along.
"""

import pickle

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData

from tests.exactness.engines import EngineConfig, EnginePool
from tests.exactness.scenarios import filler, picture, user
from vllm_mmcache import settings

pytestmark = pytest.mark.engine

CONFIG = EngineConfig("gemma3")


def resume_without_blocks(pool: EnginePool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of the resumed request, and those of the cold run."""
    rig = pool.get(CONFIG)
    engine = rig.llm.llm_engine
    conversation = [user(picture(70), "What is in this picture?" + filler(80))]
    (cold,) = rig.ask(conversation)
    prompt, images = rig.render(conversation)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    engine.add_request("resumed", {"prompt": prompt, "multi_modal_data": {"image": list(images)}}, params)
    try:
        outputs = engine.step()
        assert outputs[0].num_cached_tokens >= rig.image_spans(cold)[0][1], "the hit must cover the image"
        assert rig.llm.reset_prefix_cache(reset_running_requests=True)
        engine.reset_encoder_cache()
        while engine.has_unfinished_requests():
            outputs += engine.step()
    finally:
        engine.abort_request(["resumed"])
    return tuple(outputs[-1].outputs[0].token_ids), cold.token_ids


def test_a_resumed_request_has_its_images(pool: EnginePool) -> None:
    resumed, cold = resume_without_blocks(pool)
    assert resumed == cold


def test_without_the_swap_the_engine_dies(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, stock's behaviour; a tripwire, too: when this fails, vLLM sends the inputs again."""
    monkeypatch.setattr(settings, "_current", settings.load_settings({"resumed_images": False}))
    with pytest.raises(RuntimeError, match="Encoder cache miss"):
        resume_without_blocks(pool)
    pool.close()


def test_what_is_sent_reaches_workers_of_other_processes() -> None:
    """vLLM pickles a step for them; an attribute that it does not know must travel."""
    step = CachedRequestData.make_empty()
    step.mmcache_images = {"request": {0: "feature"}}  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(step)).mmcache_images == {"request": {0: "feature"}}
