# SPDX-License-Identifier: Apache-2.0
"""On vLLM's own scheduler: what the plugin's code does in a step, by its calls, and that it comes and goes."""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.support.schedulers import BLOCK, Steps
from tests.unit.components.image_checkpoints.conftest import KINDS
from vllm_mmcache.base import status
from vllm_mmcache.components.image_checkpoints.expected_value import ReuseRates
from vllm_mmcache.components.image_checkpoints.step_cost import StepCost
from vllm_mmcache.components.image_checkpoints.vllm_planner import Checkpoints
from vllm_mmcache.hooking import installer

pytestmark = [pytest.mark.answers, pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_installed", "no_role")]

OURS = str(Path(installer.__file__).parents[1])
IMAGES = [("one image", 40, 100), ("another image", 500, 100)]
LAST_END = (500 + 100) // BLOCK * BLOCK
NUM_DECODING = 64
MOST_CALLS_A_REQUEST = {"full attention": 0, "windows": 1, "mamba": 0}
"""Of images of Gemma 3 it is asked once which are in a step's window."""


def question(number: int) -> list[int]:
    """A prompt about two images, with its own text behind. On Mamba models it is computed in several steps."""
    return [1] * 40 + [9] * 100 + [2] * 360 + [9] * 100 + [20 + number] * 50


def decoding(engine: Steps, number: int = NUM_DECODING) -> None:
    """Requests about images that have begun to answer."""
    for request in range(number):
        engine.add([1000 + request] * 40 + [9] * 150, [(f"image {request}", 40, 100)], max_tokens=500)
    while any(request.num_output_tokens < 3 for request in engine.scheduler.requests.values()):
        engine.step()


def our_calls(act: Callable[[], Any]) -> Counter[str]:
    """Calls of the plugin's own functions, by function, while `act` runs."""
    calls: Counter[str] = Counter()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("kind", "inner"), [*((kind, False) for kind in KINDS), ("mamba", True)])
def test_answers_that_go_on_cost_no_calls(engine: Callable[..., Steps], kind: str, inner: bool, is_async: bool) -> None:
    """In a step, not one for each request of any component, but for the question that vLLM asks Gemma 3's images."""
    running = engine(kind, is_async, inner=inner)
    decoding(running)
    calls = our_calls(lambda: [running.step() for _ in range(BLOCK)])
    print(calls)
    often = {name: count // BLOCK for name, count in calls.items() if count >= BLOCK * NUM_DECODING}
    generators = {name: often.pop(name) for name in list(often) if name.endswith("<genexpr>")}
    assert sum(often.values()) <= MOST_CALLS_A_REQUEST[kind] * NUM_DECODING, often
    assert len(generators) <= (kind == "windows"), "whether only answers go on"
    rest = sum(count for name, count in calls.items() if name not in {**often, **generators}) / BLOCK
    assert rest < 60, "in a step, however many requests there are"


def test_calls_are_seen_at_all(engine: Callable[..., Steps]) -> None:
    """The control: while a prompt with a checkpoint to come is computed, each request is looked at."""
    running = engine("mamba")
    decoding(running)
    running.scheduler._mmcache_checkpoints.rates = ReuseRates()
    running.add(question(0), IMAGES)
    calls = our_calls(lambda: [running.step() for _ in range(3)])
    looked = {name: count for name, count in calls.items() if name.startswith("vllm_underway.py")}
    assert sum(looked.values()) > NUM_DECODING, calls


def replaced(scheduler: Any) -> set[str]:
    """Methods of this scheduler's objects that are not their classes' now."""
    coordinator = scheduler.kv_cache_manager.coordinator
    held = [vars(one) for one in (scheduler, coordinator, *coordinator.single_type_managers)]
    ours = ("cache_blocks", "_mamba_block_aligned_split", "allocate_new_blocks")
    return {name for one in held for name in one if name in ours}


@pytest.mark.parametrize(("kind", "inner"), [("windows", False), ("mamba", False), ("mamba", True)])
def test_methods_of_vllm_come_back_when_the_last_checkpoint_is_kept(
    engine: Callable[..., Steps], kind: str, inner: bool
) -> None:
    running = engine(kind, inner=inner)
    running.add(question(0), IMAGES, max_tokens=5)
    running.step()
    if kind == "mamba" and not inner:  # of which it takes several steps
        assert replaced(running.scheduler) == {"cache_blocks", "_mamba_block_aligned_split"}, "the control"
    running.finish()
    assert replaced(running.scheduler) == set()
    running.add(question(1), IMAGES, max_tokens=5)
    assert running.step().scheduled_new_reqs[0].num_computed_tokens == LAST_END
    running.finish()
    assert replaced(running.scheduler) == set()


@pytest.mark.parametrize("kind", ["windows", "mamba"])
def test_a_request_that_is_aborted_is_forgotten(engine: Callable[..., Steps], kind: str) -> None:
    running = engine(kind)
    long = [1] * 40 + [9] * 100 + [2] * 3000
    for number in range(5):  # of a step of 8192 tokens
        running.add([number, *long[1:]], [(f"image {number}", 40, 100), (f"later {number}", 3000, 100)])
    running.step()
    assert replaced(running.scheduler), "the control"
    running.scheduler.finish_requests(list(running.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    running.step()
    gc.collect()
    checkpoints: Checkpoints = running.scheduler._mmcache_checkpoints
    assert len(checkpoints.underway) == 0
    running.add([3] * 100)
    running.finish()
    assert replaced(running.scheduler) == set()


def test_where_nothing_is_kept_sparsely_the_hooks_are_taken_back(engine: Callable[..., Steps]) -> None:
    running = engine("full attention")
    assert str(status.of("engine")["image_checkpoints"]) == "unneeded: this model keeps every block's KV"
    assert "image_checkpoints (engine)" not in installer._installed
    assert type(running.scheduler)._get_local_prefix_cache_hit is Scheduler._get_local_prefix_cache_hit
    engine("windows")
    assert str(status.of("engine")["image_checkpoints"]) == "on"
    assert "image_checkpoints (engine)" in installer._installed, "the control"


@pytest.mark.parametrize(("inner", "are_timed"), [(False, True), (True, False)])
def test_steps_with_a_prefill_are_timed_where_checkpoints_add_steps(
    engine: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch, inner: bool, are_timed: bool
) -> None:
    """But not the first one after a pause, of which nobody knows when it began."""
    timed: list[tuple[int, float]] = []
    running = engine("mamba", inner=inner)
    monkeypatch.setattr(StepCost, "add", lambda _, tokens, seconds: timed.append((tokens, seconds)))
    running.add(question(0), IMAGES, max_tokens=5)
    tokens = [step.total_num_scheduled_tokens for step in running.finish()]
    assert [tokens for tokens, _ in timed] == [number for number in tokens[1:] if number > 1 and are_timed]
    assert bool(timed) == are_timed, "the control"
    assert all(seconds > 0 for _, seconds in timed)
