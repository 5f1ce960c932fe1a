# SPDX-License-Identifier: Apache-2.0
"""What recording costs a warm turn: the time of the wrappers alone, both sides, without what they wrap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.exactness.engines import EngineConfig, EnginePool
from tests.observe.observing import Observed, assistant, observed, picture, system, user, words
from vllm_mmcache.observe import engine, server
from vllm_mmcache.upstream.ledger import groups

pytestmark = pytest.mark.engine

NUM_IMAGES, NUM_TURNS = 20, 12
LIMIT_S = 200e-6
CONFIG = EngineConfig("qwen3-vl", max_tokens=4096, batched_tokens=4096, num_images=NUM_IMAGES)


class Clock:
    """Seconds spent in wrappers, by the wrapper's name."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}

    def timed(self, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def timed_wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            inner_s = 0.0

            def timed_wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal inner_s
                start = time.perf_counter()
                try:
                    return wrapped(*args, **kwargs)
                finally:
                    inner_s += time.perf_counter() - start

            start = time.perf_counter()
            try:
                return wrapper(timed_wrapped, instance, args, kwargs)
            finally:
                spent = time.perf_counter() - start - inner_s
                self.spent_s[wrapper.__name__] = self.spent_s.get(wrapper.__name__, 0) + spent

        return timed_wrapper


def test_a_warm_turn(pool: EnginePool, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    clock = Clock()
    for swap in groups()["observe"]:
        module, name = (engine if ".engine:" in swap.make else server), swap.make.partition(":")[2]
        if not name.endswith("_async"):
            monkeypatch.setattr(module, name, clock.timed(getattr(module, name)))
    talk = [system("Rules:" + words(200)), user(*(picture(f"cost {i}") for i in range(NUM_IMAGES)), "What are these?")]
    costs = []
    with observed():
        ask = Observed(pool.get(CONFIG))
        for turn in range(NUM_TURNS):
            clock.spent_s.clear()
            start = time.perf_counter()
            asked = ask.chat(*talk, max_tokens=1)
            took_s = time.perf_counter() - start
            costs.append(dict(clock.spent_s) | {"all": sum(clock.spent_s.values()), "turn": took_s})
            talk += [assistant(asked.text), user(f"And number {turn}?" + words(20))]
    assert asked.cached > 1300
    middle = {name: statistics.median(cost.get(name, 0) for cost in costs[1:]) for name in costs[-1]}
    record_property("seconds", middle)
    print({name: f"{1e6 * value:.0f} us" for name, value in middle.items()})
    assert middle["all"] <= LIMIT_S
    assert middle["all"] <= 0.01 * middle["turn"]
