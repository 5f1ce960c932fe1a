# SPDX-License-Identifier: Apache-2.0
"""One engine on model runner V2: stock, stock with a connector of vLLM's own, or this plugin. On the CPU.

ECCPUConnector lacks two things there, which are supplied here: the operator that copies, and an event's `query`.
"""

import ctypes
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gallery.shapes import shape_of
from benchmarks.gallery.worker import TowerRuns, config, rotation
from vllm_mmcache.prove.engines import Rig
from vllm_mmcache.prove.scenarios import picture, user
from vllm_mmcache.zoo import build_cached

SIDE = 256  # pixels of a picture in `faults`: 64 tokens of 512 float32 values in the zoo's qwen3-vl
PACKAGE_BYTES = 64 * 512 * 4
# vLLM's own cache has room for a step's tokens, or for one image of the largest size: 1,024 tokens here.
LIMITS = (
    ("max_num_batched_tokens", 1024),
    ("mm_processor_kwargs", {"size": {"shortest_edge": 256 * 256, "longest_edge": 512 * 512}}),
)


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    task = json.load(sys.stdin)
    rig = start(task)
    runs = TowerRuns(rig)
    if task["kind"] == "rotation":
        result = rotation(rig, runs, task["images"], task["rounds"], task["size"])
    else:
        result = faults(rig, runs)
    print(json.dumps(result), flush=True)
    rig.close()


def start(task: dict[str, Any]) -> Rig:
    """The engine of a task."""
    family, connector = task["family"], task["connector"]
    engine = config(family, task["settings"])
    engine = replace(engine, more=(*engine.more, *LIMITS))
    if connector:
        if connector == "ECCPUConnector":
            supply()
        transfer = {"ec_connector": connector, "ec_role": "ec_both", "ec_connector_extra_config": task["extra"]}
        engine = replace(engine, more=(*engine.more, ("ec_transfer_config", transfer)))
    return Rig(engine, build_cached(family, Path(task["zoo"]), options=shape_of(family).zoo))


def supply() -> None:
    """What vLLM's CPU build lacks of what ECCPUConnector calls."""
    import vllm.platforms  # noqa: F401 -- whose compiled extension makes the namespace
    from vllm.v1.worker.cpu.shm import _EventPlaceholder

    library = supply.library = torch.library.Library("_C_cache_ops", "FRAGMENT")  # type: ignore[attr-defined]
    library.define("swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool any_order) -> ()")

    def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, any_order: bool) -> None:
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    library.impl("swap_blocks_batch", copy, "CPU")
    _EventPlaceholder.query = lambda self: True
    _EventPlaceholder.elapsed_time = lambda self, other: 0.0


def faults(rig: Rig, runs: TowerRuns) -> dict[str, Any]:
    """What a connector does where the store has room for two images: new weights; then a known image beside a new one.

    Runs of the tower after weights of the tower have changed and reset_encoder_cache was called: 0 is a wrong answer.
    """

    def ask(*numbers: int) -> int:
        before = runs.images
        rig.ask([user(*(picture(number, (SIDE, SIDE)) for number in numbers), "?")], max_tokens=1)
        return runs.images - before

    rig.make_cold()
    ask(1)
    ask(2)
    weights = [weight for name, weight in rig.runner.model.named_parameters() if "visual" in name and weight.numel()]
    for weight in weights:
        weight.data *= 1.5
    rig.forget_all_but_features()
    result: dict[str, Any] = {"changed_weights": len(weights), "tower_runs_after_new_weights": ask(1)}
    ask(2)
    rig.forget_all_but_features()
    try:  # 1 was used longest ago, so it is what 3 takes the room of
        result["known_beside_new"] = f"answered, {ask(1, 3)} runs of the tower"
    except Exception as error:  # whatever ends the engine
        result["known_beside_new"] = f"{type(error).__name__}: {str(error)[:40]}"
    return result


if __name__ == "__main__":
    main()
