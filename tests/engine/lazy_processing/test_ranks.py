# SPDX-License-Identifier: Apache-2.0
"""Pixels are made once in the whole engine, beside its steps, however many processes its ranks are.

Ranks share no object with the scheduler here: what it learns after a request was sent to them must be sent, too.
"""

from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from vllm import SamplingParams

from tests.support.asking import Asking, prompt_of
from tests.support.pixels import Processed
from vllm_mmcache.components.features.engine.vllm_connector import Connector
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.storage import record_store
from vllm_mmcache.trial.worker import tower_images

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

CHUNK = 128  # tokens of a step
TWO_RANKS = EngineConfig(
    "qwen3-vl",
    batched_tokens=CHUNK,
    more=(("tensor_parallel_size", 2), ("distributed_executor_backend", "mp")),
)


@pytest.fixture(autouse=True)
def unknown() -> None:
    """Nothing is known of any image."""
    record_store.current().clear()


@pytest.fixture
def rig(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> ZooRig:
    """An engine with two workers of its own."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to the workers
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM would bind each rank to a NUMA node of its own
    return pool.get(TWO_RANKS)


def known(asking: Asking, *conversations: Any) -> None:
    """Have the images of conversations known to the server, and nothing of them in the engine."""
    asking.ask(*conversations)
    asking.rig.make_cold()
    asking.work()


def tower_runs(rig: ZooRig) -> list[int]:
    return list(rig.in_workers(tower_images))


@pytest.mark.parametrize("sends", [True, False], ids=["sends", "control"])
def test_an_image_of_a_later_chunk(rig: ZooRig, monkeypatch: pytest.MonkeyPatch, sends: bool) -> None:
    """When the request is sent to the ranks nobody has made its pixels yet. The control: they are not sent later."""
    if not sends:
        monkeypatch.setattr(Connector, "_send_pixels", lambda self, scheduler_output: self._unloaded.clear())
    asking = Asking(rig)
    talk = [user(picture(750), filler(3 * CHUNK), picture(751), "Compare.")]
    known(asking, talk)
    processed, start = Processed(rig, monkeypatch), tower_runs(rig)
    asking.ask(talk)
    assert tower_runs(rig) == [count + 2 for count in start]
    assert (processed.in_engine(), processed.in_ranks()) == (2, [0, 0] if sends else [1, 1])
    rig.assert_exact(asking.answers)


def test_several_requests_with_one_image(rig: ZooRig, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(rig)
    talks = [[user(filler(20, number), picture(752), "What is it?")] for number in range(3)]
    known(asking, *talks)
    processed, start = Processed(rig, monkeypatch), tower_runs(rig)
    asking.ask(*talks)
    assert tower_runs(rig) == [count + 1 for count in start]
    assert (processed.in_engine(), processed.in_ranks()) == (1, [0, 0])
    rig.assert_exact(asking.answers)


def test_a_request_that_was_preempted(rig: ZooRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its features were found, and are gone when it comes back."""
    asking = Asking(rig)
    talk = [user(picture(753), "What is it?")]
    asking.ask(talk)
    rig.forget_all_but_features()
    asking.work()
    processed, start = Processed(rig, monkeypatch), tower_runs(rig)
    engine = rig.llm.llm_engine
    rig.llm.enqueue([prompt_of(*rig.render(talk))], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    while not rig.scheduler.running:
        engine.step()
    assert (processed.in_engine(), tower_runs(rig)) == (0, start), "its features were there"
    rig.features.copying.wait(60)
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not rig.scheduler.running
    engine.reset_encoder_cache()
    rig.forget_features()
    while rig.scheduler.requests:
        engine.step()
    assert tower_runs(rig) == [count + 1 for count in start]
    assert (processed.in_engine(), processed.in_ranks()) == (1, [0, 0])
    rig.assert_exact(asking.answers)
