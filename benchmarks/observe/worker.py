# SPDX-License-Identifier: Apache-2.0
"""What recording costs a warm turn: the time of the wrappers alone, both sides, without what they wrap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.tasks import run_task
from tests.exactness.engines import EngineConfig, EnginePool
from tests.observe.observing import Observed, assistant, observed, picture, system, user, words
from vllm_mmcache.observe import engine, server, vllm_side
from vllm_mmcache.upstream.ledger import groups


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


def warm_turns(pool: EnginePool, images: int, turns: int) -> dict[str, float]:
    """Median seconds of a warm turn in each wrapper, in all of them, and of the turn itself."""
    clock = Clock()
    for swap in groups()["observe"]:
        module, name = (engine if ".engine:" in swap.make else server), swap.make.partition(":")[2]
        if not name.endswith("_async"):
            setattr(module, name, clock.timed(getattr(module, name)))
    vllm_side.send_outcome = clock.timed(vllm_side.send_outcome)  # part of a wrapper that is always there
    talk = [system("Rules:" + words(200)), user(*(picture(f"cost {i}") for i in range(images)), "What are these?")]
    config = EngineConfig("qwen3-vl", max_tokens=8192, batched_tokens=8192, num_images=images)
    costs = []
    with observed():
        ask = Observed(pool.get(config))
        for turn in range(turns + 1):
            clock.spent_s.clear()
            start = time.perf_counter()
            asked = ask.chat(*talk, max_tokens=1)
            took_s = time.perf_counter() - start
            costs.append(dict(clock.spent_s) | {"all": sum(clock.spent_s.values()), "turn": took_s})
            talk += [assistant(asked.text), user(f"And number {turn}?" + words(20))]
    assert asked.cached > 64 * images, "the turn was not warm"
    return {name: statistics.median(cost.get(name, 0) for cost in costs[1:]) for name in costs[-1]}


if __name__ == "__main__":
    run_task({"warm_turns": warm_turns})
