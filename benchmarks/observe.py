# SPDX-License-Identifier: Apache-2.0
"""What recording costs a warm turn: turns with and without it, and the time of the wrappers without what they wrap.

Targets: at most 200 microseconds a request, and 1 % of its time.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from benchmarks.results import Result
from benchmarks.sides import run_worker
from tests.observe.observing import Observed, assistant, observed, picture, system, user, words
from vllm_mmcache import rooms
from vllm_mmcache.observe import carrier, engine, recorder, server
from vllm_mmcache.observe.recorder import RECORDER
from vllm_mmcache.prove.engines import EngineConfig, EnginePool
from vllm_mmcache.upstream.ledger import groups


def measure(options: Namespace) -> Result:
    """Both ways; stock is the plugin without the recording."""
    result, images = Result(), options.images
    parts = run_worker("benchmarks.observe:warm_turns", "mmcache", images=images, turns=options.turns)
    for name, seconds in parts.items():
        result.add(name, "time_s", {"mmcache": seconds})
    turn = run_worker("benchmarks.observe:alternate", "mmcache", images=images, turns=options.pairs)
    result.add("recording a turn", "time_s", {"mmcache": turn["recorded"] - turn["plain"]})
    result.add("recorded turn", "time_s", {"stock": turn["plain"], "mmcache": turn["recorded"]})
    return result


class Wrapped:
    """What a wrapper wraps, timed. Wrappers read its arguments by name, which is looked up once for each function."""

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self._wrapped = wrapped
        self.__func__ = getattr(wrapped, "__func__", wrapped)
        self.__self__ = getattr(wrapped, "__self__", None)
        self.spent_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._wrapped(*args, **kwargs)
        finally:
            self.spent_s += time.perf_counter() - start


class Clock:
    """Seconds spent in wrappers, by the wrapper's name."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}

    def timed(self, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def timed_wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            inner, start = Wrapped(wrapped), time.perf_counter()
            try:
                return wrapper(inner, instance, args, kwargs)
            finally:
                spent = time.perf_counter() - start - inner.spent_s
                self.spent_s[wrapper.__name__] = self.spent_s.get(wrapper.__name__, 0) + spent

        return timed_wrapper


CONFIG = EngineConfig("qwen3-vl", max_tokens=8192, batched_tokens=8192)


def opening(images: int) -> list[Any]:
    """A conversation's first two messages."""
    return [system("Rules:" + words(200)), user(*(picture(f"cost {i}") for i in range(images)), "What are these?")]


def alternate(root: Path, images: int, turns: int) -> dict[str, float]:
    """Median seconds of a warm turn behind 15 others, recorded and not recorded in turn, in one process."""
    talk = opening(images)
    for turn in range(15):
        talk += [assistant("yes"), user(f"And number {turn}?" + words(20))]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    pool = EnginePool(root)
    with observed():
        rig = pool.get(replace(CONFIG, num_images=images))
        sampling = SamplingParams(max_tokens=1, temperature=0)
        for number in range(2 * turns):
            is_recorded = number % 2 == 0
            rooms._is_on["observe"] = is_recorded
            start = time.perf_counter()
            rig.llm.chat([[*talk, user(f"turn {number} " + words(5, number))]], sampling, use_tqdm=False)
            seconds[is_recorded].append(time.perf_counter() - start)
    pool.close()
    warm = turns // 10  # the first ones are not
    return {name: statistics.median(seconds[key][warm:]) for name, key in (("recorded", True), ("plain", False))}


def warm_turns(root: Path, images: int, turns: int) -> dict[str, float]:
    """Median seconds of a warm turn in each wrapper, in all of them, and of the turn itself.

    `afterwards` is what a thread does after the first output.
    """
    clock = Clock()
    for hook in groups()["observe"]:
        module, name = (engine if ".engine:" in hook.make else server), hook.make.partition(":")[2]
        if not name.endswith("_async"):
            setattr(module, name, clock.timed(getattr(module, name)))
    recorder.LAG_S = 60  # what the thread would do is timed apart
    carrier.send_outcome = clock.timed(carrier.send_outcome)  # part of a wrapper that is always there
    talk, costs, pool = opening(images), [], EnginePool(root)
    with observed():
        ask = Observed(pool.get(replace(CONFIG, num_images=images)))
        for turn in range(turns + 1):
            clock.spent_s.clear()
            start = time.perf_counter()
            output = ask.put(*talk, max_tokens=1)
            cost = dict(clock.spent_s) | {"all": sum(clock.spent_s.values()), "turn": time.perf_counter() - start}
            start = time.perf_counter()
            RECORDER.read_notes()
            costs.append(cost | {"afterwards": time.perf_counter() - start})
            asked = ask.recorded(output)
            talk += [assistant(asked.text), user(f"And number {turn}?" + words(20))]
    pool.close()
    assert asked.cached > 64 * images, "the turn was not warm"
    return {name: statistics.median(cost.get(name, 0) for cost in costs[1:]) for name in costs[-1]}
