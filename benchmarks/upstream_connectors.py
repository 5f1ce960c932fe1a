# SPDX-License-Identifier: Apache-2.0
"""The feature store beside vLLM's own encoder-cache connectors: rotation, restart, two faults. Model runner V2, CPU.

V2's kernels run in Triton's interpreter there, so a tower takes seconds and times say little: runs of the tower count.
ECCPUConnector lacks two things on the CPU, which are supplied here: the operator that copies, and an event's `query`.
"""

import ctypes
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks.replays import Work, requests, started
from benchmarks.results import Result, run_worker
from benchmarks.workloads import rotation
from tests.support import runner_v2
from vllm_mmcache.exactness.conversations import picture, user

SIDE = 256  # pixels of a picture in `faults`: 64 tokens of 512 float32 values in the zoo's qwen3-vl
PACKAGE_BYTES = 64 * 512 * 4
# vLLM's own cache has room for a step's tokens, or for one image of the largest size: 1,024 tokens here.
LIMITS = {
    "max_num_batched_tokens": 1024,
    "mm_processor_kwargs": {"size": {"shortest_edge": 256 * 256, "longest_edge": 512 * 512}},
}
WITH_LIMIT = ("ECCPUConnector", "mmcache")  # of what they keep; the others have none, so no fault of it


def measure(options: Namespace) -> Result:
    """Of each side two processes after each other on one place: the first's two rounds, and the second's first."""
    result, found, images = Result(), dict[str, dict[tuple[str, str], float]](), options.images
    for side in options.sides:
        with tempfile.TemporaryDirectory() as place:
            filled, again = (
                run_worker_on(side, place, "rotated", 1024**3, images=images, size=options.size, rounds=rounds)
                for rounds in (2, 1)
            )
        runs = {"first": filled[:images], "rotation": filled[images:], "restart": again}
        found[side] = {(case, "tower_runs"): sum(numbers) for case, numbers in runs.items()}
        if side in WITH_LIMIT:
            with tempfile.TemporaryDirectory() as place:
                faults = run_worker_on(side, place, "faults", 2 * PACKAGE_BYTES)
            result.details[side] = {"known_beside_new": (said := faults.pop("known_beside_new"))}
            found[side] |= {("new weights", what): number for what, number in faults.items()}
            found[side]["memory full", "answered"] = float(said.startswith("answered"))
    result.add_sides(found)
    return result


def run_worker_on(side: str, place: str, name: str, num_bytes: int, **task: Any) -> Any:
    """One task in a process of its own. num_bytes: what a side may keep in RAM."""
    extra = {"ECCPUConnector": {"ec_cpu_bytes": num_bytes},
             "ECExampleConnector": {"shared_storage_path": str(Path(place) / "features")}}  # fmt: skip
    if side in extra:
        task["transfer"] = {"ec_connector": side, "ec_role": "ec_both", "ec_connector_extra_config": extra[side]}
    if side == "mmcache":
        task["settings"] = {"features": True, "store": str(Path(place) / "store"), "feature_ram_bytes": num_bytes}
    return run_worker(f"benchmarks.upstream_connectors:{name}", side, runner_v2.environment(), root=place, **task)


def engine(root: Path, settings: dict[str, Any] | None = None, transfer: dict[str, Any] | None = None) -> Any:
    """The engine of a task, until the block ends."""
    if transfer and transfer["ec_connector"] == "ECCPUConnector":
        supply()
    more = LIMITS | ({"ec_transfer_config": transfer} if transfer else {})
    return started(root, "qwen3-vl", settings or {}, max_tokens=4096, more=more)


def rotated(root: Path, images: int, size: int, rounds: int, **side: Any) -> list[int]:
    """Runs of the tower, request by request, of images in rotation."""
    with engine(root, **side) as rig:
        rig.make_cold()
        return [one["tower_runs"] for one in requests(rig, Work(rig), rotation(images, size, rounds), 1)]


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


def faults(root: Path, **side: Any) -> dict[str, Any]:
    """What a connector does where the store has room for two images: new weights; then a known image beside a new one.

    Runs of the tower after weights of the tower have changed and reset_encoder_cache was called: 0 is a wrong answer.
    """
    with engine(root, **side) as rig:
        work = Work(rig)

        def ask(*numbers: int) -> int:
            before = work.done["tower_runs"]
            rig.ask([user(*(picture(number, (SIDE, SIDE)) for number in numbers), "?")], max_tokens=1)
            return work.done["tower_runs"] - before

        rig.make_cold()
        ask(1)
        ask(2)
        weights = [one for name, one in rig.runner.model.named_parameters() if "visual" in name and one.numel()]
        for weight in weights:
            weight.data *= 1.5
        rig.forget_all_but_features()
        result: dict[str, Any] = {"changed_weights": len(weights), "tower_runs": ask(1)}
        ask(2)
        rig.forget_all_but_features()
        try:  # 1 was used longest ago, so it is what 3 takes the room of
            return result | {"known_beside_new": f"answered, {ask(1, 3)} runs of the tower"}
        except Exception as error:  # whatever ends the engine
            return result | {"known_beside_new": f"{type(error).__name__}: {str(error)[:40]}"}
