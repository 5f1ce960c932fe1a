# SPDX-License-Identifier: Apache-2.0
"""What the plugin's hooks cost a step of the scheduler in which only answers go on: vLLM's own scheduler, no model.

256 requests, each with an image, decode; a step is `schedule` and `update_from_output`, and what a model would give is
made up. Stock and plugin are measured in one process in turn: all hooks of the engine's process are installed before
the plugin's part of a round, and taken back after it. The plugin has its default components, as on a proven engine, and
its feature store. Target: at most 1.05 of stock's time.
"""

import gc
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from mmcache_tools.zoo import build_cached

from benchmarks.results import SIDES, Result, in_turn, run_worker
from tests.support import schedulers
from vllm_mmcache.base import status
from vllm_mmcache.base.status import State
from vllm_mmcache.components.features.engine import hooks
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle import activation, rank_sync

RANK = {"row": 0, "width": 8, "dtype": "float32", "model": "model", "processor": "processor", "layout": "shared"}
"""What a rank that encodes says of itself."""
MOST_TOKENS = 3000  # of an answer
FAMILIES = {"": "qwen3-vl", "window": "gemma3", "mamba": "qwen3.5"}
PROMPT = (100, 200, 50)  # tokens before the image, of it, and behind it


def measure(options: Namespace) -> Result:
    """Each kind of model, synchronous and asynchronous. Units: milliseconds of a step."""
    result = Result()
    given = {name: getattr(options, name) for name in ("requests", "rounds", "steps")}
    for kind in options.kinds:
        sparse, num_groups = kind.split("-")
        for is_async in (False, True):
            found = run_worker(
                "benchmarks.scheduler_steps:steps", "mmcache", {"MMCACHE_UNPROVEN": "1"},
                sparse=sparse.removeprefix("full"), num_groups=int(num_groups), is_async=is_async, **given,
            )  # fmt: skip
            case = f"{kind}, {'async' if is_async else 'sync'}"
            result.add(case, "cpu_ms", found["cpu_ms"])
            result.details[case] = {name: found[name] for name in ("ratio", "components")}
            print(case, result.details[case])
    return result


def steps(
    root: Path, sparse: Any, num_groups: int, is_async: bool, requests: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Median milliseconds of the processor for a step of each side, and the ratio of each round."""
    model = build_cached(FAMILIES[sparse], root)
    sides = {name: Side(model, sparse, num_groups, is_async, requests, name == "mmcache") for name in SIDES}
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds):
        for name in in_turn(1, SIDES) if number % 2 else in_turn(1, SIDES[::-1]):
            found[name].append(median(sides[name].round(steps)))
    ratios = [ours / stock for stock, ours in zip(found["stock"], found["mmcache"], strict=True)]
    return {
        "cpu_ms": {name: median(ms) for name, ms in found.items()},
        "ratio": median(ratios),
        "components": {name: str(state) for name, state in sides["mmcache"].states.items()},
    }


class Side:
    """One scheduler with requests that decode. The plugin's hooks are there only while it is at work."""

    def __init__(
        self, model: Path, sparse: Any, num_groups: int, is_async: bool, num_requests: int, is_ours: bool
    ) -> None:
        self.is_ours = is_ours
        self.states: dict[str, State] = {}
        self.groups: set[str] = set()
        dtype = {"dtype": "bfloat16"} if sparse == "mamba" else {}
        self.config = schedulers.engine_config(model, is_async=is_async, max_num_seqs=num_requests, **dtype)
        self._install()
        if is_ours and status.is_on("features"):
            hooks.prepare(self.config)
            hooks.open_store(self.config, [RANK])
        num_blocks = num_requests * num_groups * (sum(PROMPT) + MOST_TOKENS) // schedulers.BLOCK
        specs = schedulers.groups(sparse, num_groups)
        scheduler = schedulers.make_scheduler(self.config, specs, num_blocks, with_plugin=is_ours)
        if is_ours:
            rank_sync.of_engine(Namespace(scheduler=scheduler, model_executor=None))
            self.states, self.groups = dict(status.of("engine")), set(installer._installed)
        self.engine = schedulers.Steps(scheduler, is_async)
        before, inside, behind = PROMPT
        for number in range(num_requests):
            tokens = [number, *[5] * (before - 1), *[9] * inside, *[6] * behind]
            self.engine.add(tokens, [(f"{number:064}", before, inside)], MOST_TOKENS)
        while any(request.num_output_tokens < 2 for request in scheduler.requests.values()):
            self.engine.step()
        self._uninstall()

    def round(self, num_steps: int) -> list[float]:
        """Milliseconds of the processor for each of so many steps."""
        found = []
        self._install()
        gc.disable()
        for _ in range(num_steps):
            self.engine.seconds = 0.0
            self.engine.step()
            found.append(1000 * self.engine.seconds)
        gc.enable()
        self._uninstall()
        return found

    def _install(self) -> None:
        """The hooks of the engine's process, as they are once this side's scheduler is made."""
        if self.is_ours:
            activation.activate("engine", self.config)
            for component, state in self.states.items():
                status.put("engine", component, state)
            for group in [group for group in installer._installed if self.groups and group not in self.groups]:
                installer.undo(group)

    def _uninstall(self) -> None:
        """vLLM as it is."""
        activation.stop()
