# SPDX-License-Identifier: Apache-2.0
"""With async scheduling a step is scheduled before the last one's outcome is known; records are right all the same.

On V1 and V2 without it the same is asked, and easier.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from vllm import SamplingParams

from tests.engine.observe.test_scenarios import kv_cache_manager
from tests.support.observing import Observed, assert_whole, observing
from vllm_mmcache.base import failsafe
from vllm_mmcache.components.observe.record.recorder import RECORDER
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.exactness.conversations import filler, picture
from vllm_mmcache.exactness.conversations import user as turn

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

BLOCK = 32


@pytest.fixture
def ask(pool: EnginePool) -> Iterator[Observed]:
    with observing(pool, EngineConfig("qwen3-vl")) as engine:
        yield engine


def test_a_request_that_is_aborted_in_flight(ask: Observed, caplog: pytest.LogCaptureFixture) -> None:
    """Its step is still running; what that step did for another request is recorded, and nothing is left of it."""
    failsafe._logged.clear()
    caplog.set_level(logging.ERROR, logger="vllm.mmcache")
    logging.getLogger("vllm.mmcache").addHandler(caplog.handler)
    engine = ask.rig.llm.llm_engine
    names = []
    for number in (730, 731):
        prompt, images = ask.rig.render([turn(filler(40), picture(number), "What is it?")])
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        names.append(
            engine.add_request(f"r{number}", {"prompt": prompt, "multi_modal_data": {"image": list(images)}}, params)
        )
    try:
        engine.step()
        engine.abort_request([names[0]], internal=True)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        logging.getLogger("vllm.mmcache").removeHandler(caplog.handler)
    assert not [record.message for record in caplog.records if "bookkeeping" in record.message]
    (record,) = RECORDER.store.named("r731")
    assert_whole(record)
    assert [segment.image.features for segment in record.segments if segment.image] == ["tower"]
    observer = vars(kv_cache_manager(ask))["_mmcache_observer"]
    assert (observer.waiting, observer.ended) == ({}, [])


def test_an_answer_that_ends_before_it_was_foreseen(ask: Observed) -> None:
    """One more step is under way then. The block that only it would fill was never there, so not evicted."""
    for length in range(5 * BLOCK - 8, 5 * BLOCK - 1):
        tokens = [100 + (length + i) % 300 for i in range(length)]
        (asked,) = ask.generate({"prompt_token_ids": tokens}, max_tokens=8)
        answer = list(asked.output.outputs[0].token_ids)[: 5 * BLOCK - length]
        if answer.index(answer[-1]) == len(answer) - 1:
            break
    else:
        pytest.fail("no answer has a token of its own where a block ends")
    ask.rig.make_cold()
    for owner in (kv_cache_manager(ask), kv_cache_manager(ask).block_pool):  # what it remembers of that answer
        vars(owner).pop("_mmcache_observer", None)
    stop = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, stop_token_ids=[answer[-1]])
    (ended,) = ask.rig.llm.generate([{"prompt_token_ids": tokens}], stop, use_tqdm=False)
    assert list(ended.outputs[0].token_ids) == answer
    (more,) = ask.generate({"prompt_token_ids": tokens + answer + [99] * 40}, max_tokens=1)
    assert more.cached == 4 * BLOCK
    assert more.reasons == [Reason.BLOCK_TAIL, Reason.NEW_CONTENT], more.record
