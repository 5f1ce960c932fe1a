# SPDX-License-Identifier: Apache-2.0
"""What recording costs a warm turn behind 15 others, recorded and not in turn, in one process: at most 1 % of its time.

Stock is the plugin without the recording.
"""

from argparse import Namespace
from collections.abc import Callable
from itertools import count
from pathlib import Path

from mmcache_tools.harness.engines import EngineConfig, EnginePool
from vllm import SamplingParams

from benchmarks.results import Result, medians, run_worker
from tests.support.observing import assistant, observed, picture, system, user, words
from vllm_mmcache.base import status


def measure(options: Namespace) -> Result:
    result = Result()
    turn = run_worker("benchmarks.observe:warm_turns", "mmcache", images=options.images, turns=options.pairs)
    result.add("recording a turn", "time_s", {"mmcache": turn["mmcache"] - turn["stock"]})
    result.add("recorded turn", "time_s", turn)
    return result


def warm_turns(root: Path, images: int, turns: int) -> dict[str, float]:
    """Median seconds by side."""
    pictures = (picture(f"cost {number}") for number in range(images))
    talk = [system("Rules:" + words(200)), user(*pictures, "What are these?")]
    for turn in range(15):
        talk += [assistant("yes"), user(f"And number {turn}?" + words(20))]
    pool, sampling, numbers = EnginePool(root), SamplingParams(max_tokens=1, temperature=0), count()
    warm_up = turns // 10

    def ask(is_recorded: bool) -> Callable[[], object]:
        number = next(numbers)
        status._is_on["observe"] = is_recorded
        turn = [*talk, user(f"turn {number} " + words(5, number))]
        return lambda: rig.llm.chat([turn], sampling, use_tqdm=False)

    with observed():
        rig = pool.get(EngineConfig("qwen3-vl", max_tokens=8192, batched_tokens=8192, num_images=images))
        found = medians({"mmcache": lambda: ask(True), "stock": lambda: ask(False)}, turns - warm_up, warm_up)
    pool.close()
    return found
