# SPDX-License-Identifier: Apache-2.0
"""Counts go from one pipeline stage to the next with its tensors, by each of vLLM's ways; the model sees its own."""

import json
import os
import subprocess
import sys
import uuid
from typing import Any

import pytest

pytestmark = pytest.mark.process

STAGE = """
import json, os, sys, torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import installer
from vllm_mmcache.metrics import counters, transport
from vllm_mmcache.lifecycle.registry import COMPONENTS

rank, place = int(sys.argv[1]), sys.argv[2]
assert installer.install("metrics", COMPONENTS["metrics"].all_hooks(), vllm_version()).state == "on"
with set_current_vllm_config(VllmConfig()):
    parallel_state.init_distributed_environment(2, rank, f"file://{place}", rank, "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, backend="gloo")
group, peers = parallel_state.get_pp_group(), parallel_state.get_tp_group()

def step(number):
    if rank == 0:
        if number != 1:  # a step in which nothing happened
            counters.TOWER_IMAGES.add(number + 1)
        sent = {"hidden": torch.full((2, 3), float(number)), "residual": torch.zeros(0)}
        for handle in group.isend_tensor_dict(sent, all_gather_group=peers):
            handle.wait()
        assert list(sent) == ["hidden", "residual"]
    else:
        tensors, handles, more = group.irecv_tensor_dict(all_gather_group=peers)
        for handle in handles:
            handle.wait()
        for one in more:
            one()
        return [sorted(tensors), tensors["hidden"].tolist(), transport.take_worker_counts()]

received = {"custom": [step(number) for number in range(3)]}
group.use_cpu_custom_send_recv = False  # as on a GPU
received["objects"] = [step(number) for number in range(3)]
installer.undo("metrics")
received["without"] = [step(number) for number in range(3)]
print("received:", json.dumps(received))
torch.distributed.barrier()
"""


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the second of two stages received in each of three steps: names, hidden states, counts."""
    directory = tmp_path_factory.mktemp("stages")
    program = directory / "stage.py"
    program.write_text(STAGE)
    environment = os.environ | {"VLLM_DIST_IDENT": uuid.uuid4().hex, "VLLM_LOGGING_LEVEL": "ERROR"}
    stages = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(directory / "rendezvous")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        _, said = [stage.communicate(timeout=300)[0] for stage in stages]
    finally:
        for stage in stages:
            stage.kill()
    assert [stage.returncode for stage in stages] == [0, 0]
    (line,) = [line for line in said.splitlines() if line.startswith("received: ")]
    found: dict[str, Any] = json.loads(line.removeprefix("received: "))
    return found


@pytest.mark.parametrize("way", ["custom", "objects"])
def test_the_next_stage_knows(received: dict[str, Any], way: str) -> None:
    names, hidden, counts = zip(*received[way], strict=True)
    assert names == (["hidden", "residual"],) * 3
    assert hidden == tuple([[float(step)] * 3] * 2 for step in range(3))
    assert counts == (
        {"tower_images": 1.0},
        None,
        {"tower_images": 3.0},
    )


def test_without_it_nothing_arrives(received: dict[str, Any]) -> None:
    """Negative control."""
    assert [counts for _, _, counts in received["without"]] == [None] * 3
