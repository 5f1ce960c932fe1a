# SPDX-License-Identifier: Apache-2.0
"""One side's questions about images in rotation, or about images that are all new, in a process of its own."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gallery.shapes import shape_of
from vllm_mmcache.prove.engines import EngineConfig, Rig
from vllm_mmcache.prove.scenarios import picture, user
from vllm_mmcache.zoo import build_cached


class TowerRuns:
    """Counts the images that the vision tower of an engine runs for, on stock too."""

    def __init__(self, rig: Rig) -> None:
        self.images = 0
        model = rig.runner.model
        embed = model.embed_multimodal

        def counted(**kwargs: Any) -> Any:
            outputs = embed(**kwargs)
            self.images += len(outputs)
            return outputs

        model.embed_multimodal = counted


def rotation(rig: Rig, runs: TowerRuns, images: int, rounds: int, size: int) -> dict[str, Any]:
    """Seconds of each question and runs of the tower, by round. Every image is asked about once a round."""
    rig.make_cold()
    seconds: list[list[float]] = []
    tower: list[int] = []
    for round_ in range(rounds):
        before = runs.images
        seconds.append([timed(rig, number, size, f"{round_}?") for number in range(images)])
        tower.append(runs.images - before)
    return {"seconds": seconds, "tower_runs": tower}


def all_new(rig: Rig, runs: TowerRuns, images: int, size: int) -> dict[str, Any]:
    """Seconds of questions about images that never come again: what saving costs.

    A process's first runs of the tower take up to half as long again, on stock too: as many images go ahead.
    """
    rig.make_cold()
    for number in range(images):
        timed(rig, 900 + number, size, "?")
    return {"seconds": [[timed(rig, 1000 + number, size, "?") for number in range(images)]]}


def timed(rig: Rig, number: int, size: int, question: str) -> float:
    """Seconds to the first token of a question about an image."""
    conversation = [user(picture(number, (size, size)), question)]
    start = time.perf_counter()
    rig.ask(conversation, max_tokens=1)
    return time.perf_counter() - start


def config(family: str, settings: dict[str, Any]) -> EngineConfig:
    """vLLM's own block size and token budget; the settings of mmcache are nothing to stock."""
    more = (("additional_config", {"mmcache": settings}), *shape_of(family).engine)
    return EngineConfig(family, block_tokens=None, batched_tokens=None, max_tokens=4096, more=more)


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    task = json.load(sys.stdin)
    kinds = {"rotation": rotation, "all_new": all_new}
    family = task.pop("family")
    with tempfile.TemporaryDirectory() as scratch:
        # A process that is to find what another one saved needs its model: vLLM's name of an image holds the path.
        model = build_cached(family, Path(task.pop("zoo", scratch)), options=shape_of(family).zoo)
        settings = {"store": str(Path(scratch) / "store")} if task.pop("with_disk", False) else task.pop("settings", {})
        rig = Rig(config(family, settings), model)
        result = kinds[task.pop("kind")](rig, TowerRuns(rig), **task)
        print(json.dumps(result), flush=True)
        rig.close()


if __name__ == "__main__":
    main()
