# SPDX-License-Identifier: Apache-2.0
"""The feature store beside vLLM's own encoder-cache connectors: rotation, restart, two faults. Model runner V2, CPU.

V2's kernels run in Triton's interpreter there, so a tower takes seconds and times say little: runs of the tower count.
ECCPUConnector lacks two things on the CPU, which are supplied here: the operator that copies, and an event's `query`.
"""

import ctypes
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engines import Work, requests, started
from benchmarks.results import Result
from benchmarks.sides import run_worker
from benchmarks.workloads import rotation
from tests import runner_v2
from vllm_mmcache.prove.engines import Rig
from vllm_mmcache.prove.scenarios import picture, user

SIDE = 256  # pixels of a picture in `faults`: 64 tokens of 512 float32 values in the zoo's qwen3-vl
PACKAGE_BYTES = 64 * 512 * 4
# vLLM's own cache has room for a step's tokens, or for one image of the largest size: 1,024 tokens here.
LIMITS = (
    ("max_num_batched_tokens", 1024),
    ("mm_processor_kwargs", {"size": {"shortest_edge": 256 * 256, "longest_edge": 512 * 512}}),
)
WITH_LIMIT = ("ECCPUConnector", "mmcache")  # of what they keep; the others have none, so no fault of it


def measure(options: Namespace) -> Result:
    """Of each side two processes after each other on one place: the first's two rounds, and the second's first."""
    result = Result()
    found: dict[tuple[str, str], dict[str, float]] = {}
    for side in options.sides:
        with tempfile.TemporaryDirectory() as place:
            filled = run(side, place, "rounds", 1024**3, images=options.images, size=options.size, rounds=2)
            again = run(side, place, "rounds", 1024**3, images=options.images, size=options.size, rounds=1)
        for case, asked in (("first", filled[: options.images]), ("rotation", filled[options.images :]),
                            ("restart", again)):  # fmt: skip
            found.setdefault((case, "tower_runs"), {})[side] = sum(one["tower_runs"] for one in asked)
            found.setdefault((case, "time_s"), {})[side] = median(one["time_s"] for one in asked)
        if side in WITH_LIMIT:
            with tempfile.TemporaryDirectory() as place:
                faults = run(side, place, "faults", 2 * PACKAGE_BYTES)
            result.details[side] = {"known_beside_new": (said := faults.pop("known_beside_new"))}
            found.setdefault(("memory full", "answered"), {})[side] = float(said.startswith("answered"))
            for what, number in faults.items():
                found.setdefault(("new weights", what), {})[side] = number
    for (case, what), numbers in found.items():
        result.add(case, what, numbers)
    return result


def run(side: str, place: str, name: str, num_bytes: int, **more: Any) -> Any:
    """One task in a process of its own. num_bytes: what a side may keep in RAM."""
    extra = {
        "ECCPUConnector": {"ec_cpu_bytes": num_bytes},
        "ECExampleConnector": {"shared_storage_path": str(Path(place) / "features")},
    }
    settings = {"features": True, "store": str(Path(place) / "store"), "feature_ram_bytes": num_bytes}
    task = {"root": place, "connector": side if side in extra else "", "extra": extra.get(side, {}), **more}
    task["settings"] = settings if side == "mmcache" else {}
    return run_worker(f"benchmarks.upstream_connectors:{name}", side, runner_v2.environment(), **task)


def engine(root: Path, connector: str, extra: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The engine of a task, until the block ends."""
    more: tuple[tuple[str, Any], ...] = LIMITS
    if connector:
        if connector == "ECCPUConnector":
            supply()
        transfer = {"ec_connector": connector, "ec_role": "ec_both", "ec_connector_extra_config": extra}
        more = (*more, ("ec_transfer_config", transfer))
    return started(root, "qwen3-vl", settings, max_tokens=4096, more=more)


def rounds(
    root: Path, connector: str, extra: dict[str, Any], settings: dict[str, Any], images: int, size: int, rounds: int
) -> list[dict[str, Any]]:
    """The requests of images in rotation."""
    with engine(root, connector, extra, settings) as rig:
        rig.make_cold()
        return list(requests(rig, Work(rig), rotation(images, size, rounds), 1))


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


def faults(root: Path, connector: str, extra: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What a connector does where the store has room for two images: new weights; then a known image beside a new one.

    Runs of the tower after weights of the tower have changed and reset_encoder_cache was called: 0 is a wrong answer.
    """
    with engine(root, connector, extra, settings) as rig:
        return faults_of(rig, Work(rig))


def faults_of(rig: Rig, work: Work) -> dict[str, Any]:
    def ask(*numbers: int) -> int:
        before = work.tower_runs
        rig.ask([user(*(picture(number, (SIDE, SIDE)) for number in numbers), "?")], max_tokens=1)
        return work.tower_runs - before

    rig.make_cold()
    ask(1)
    ask(2)
    weights = [weight for name, weight in rig.runner.model.named_parameters() if "visual" in name and weight.numel()]
    for weight in weights:
        weight.data *= 1.5
    rig.forget_all_but_features()
    result: dict[str, Any] = {"changed_weights": len(weights), "tower_runs": ask(1)}
    ask(2)
    rig.forget_all_but_features()
    try:  # 1 was used longest ago, so it is what 3 takes the room of
        result["known_beside_new"] = f"answered, {ask(1, 3)} runs of the tower"
    except Exception as error:  # whatever ends the engine
        result["known_beside_new"] = f"{type(error).__name__}: {str(error)[:40]}"
    return result
