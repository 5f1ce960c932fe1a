# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM's prefix caching with MTP on a hybrid model, reported as wrong (vLLM 53912, 43559, 47194, 51571).

Shown: on V1 with async scheduling a request goes on by another request's count of accepted tokens, and so from a state
that lacks tokens, or has too many. Not shown on V1 with synchronous scheduling, nor on V2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.tolerances import BF16_SELF_TOLERANCE

from tests.support.engine_configuration import EngineConfiguration
from tests.support.runner_v2 import environment as interpreter
from tests.support.sizes import larger
from tests.support.vllm_tree import apply, copy_installed

pytestmark = pytest.mark.engine

V1 = EngineConfiguration(1, is_async=False)
V1_ASYNC = EngineConfiguration(1, is_async=True)
V2_ASYNC = EngineConfiguration(2, is_async=True)

# Sixteen requests, three at once: often one begins in the row of one that has ended, before rows that go on.
TRAFFIC: dict[str, Any] = {
    "prompts": [[50, 40, 30, 55, 100, 90, 80, 20, 110, 115, 30, 40, 35, 45, 60, 70]],
    "answers": [[10, 21, 50, 11, 13, 20, 7, 30, 9, 21, 12, 17, 15, 9, 22, 14]],
}
# Blocks have 160 tokens. Each first and third answer runs over a block's end, at another distance from its beginning;
# each second and fourth begins a few tokens behind it.
BOUNDARIES: dict[str, Any] = {
    "prompts": [
        [150, 151, 152, 153, 154, 155, 156, 157],
        [1, 2, 3, 4, 1, 2, 1, 3],
        [150, 140, 151, 150, 145, 146, 147, 148],
        [1, 2, 2, 3, 1, 1, 1, 1],
    ],
    "answers": [[13, 14, 12, 11, 14, 9, 10, 8], [8] * 8, [12, 30, 12, 12, 12, 13, 14, 15], [8] * 8],
    "num_seqs": 4,
    "drops_block": False,
}


def conversed(where: EngineConfiguration, scratch: Path, tree: Path | None = None, **task: Any) -> Any:
    """What the worker found with vLLM alone, the installed one or a tree's, on a runner with a way of scheduling."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    environ |= interpreter(is_async=where.is_async) | {"VLLM_USE_V2_MODEL_RUNNER": str(where.runner - 1)}
    if tree is not None:
        environ["PYTHONPATH"] = f"{tree}{os.pathsep}{environ['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.speculative.hybrid_worker"],
        input=json.dumps({"scratch": str(scratch)} | task),
        env=environ | {"MMCACHE_DISABLE": "1"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert (found["plugin"], found["mode"]) == (False, "align")
    assert (found["is_v2"], found["is_async"]) == (where.runner == 2, where.is_async)
    assert 0 < found["accepted_tokens"] < found["draft_tokens"], "nothing was rejected, or nothing accepted"
    far = [answer for answer in found["answers"] if max(answer["errors"]) > BF16_SELF_TOLERANCE]
    found["far"] = [(answer["turn"], answer["request"]) for answer in far]
    print(where, task.get("change"), {name: value for name, value in found.items() if name != "answers"})
    print("cached", [answer["cached"] for answer in found["answers"]])
    print("largest errors", [round(max(answer["errors"]), 2) for answer in found["answers"]])
    return found


@larger
def test_v1_with_async_scheduling_takes_the_count_of_another_request(tmp_path: Path) -> None:
    """When this fails since nothing is wrong any more, vLLM has mended it: say so in docs/limits.md."""
    stock = conversed(V1_ASYNC, tmp_path, **TRAFFIC)
    assert stock["wrong"] > 0, "vLLM has mended it"
    assert len(stock["far"]) > 2
    # No other request's answer is wrong.
    assert {str(request) for _, request in stock["far"]} <= set(stock["wrong_requests"])
    tree = copy_installed(tmp_path / "patched")
    assert apply("--only", "accepted-counts", tree).returncode == 0
    mended = conversed(V1_ASYNC, tmp_path, tree, **TRAFFIC)
    assert mended["counts"] > 50
    assert (mended["wrong"], mended["far"]) == (0, [])


@larger
@pytest.mark.parametrize("where", [V1, V2_ASYNC], ids=str)
def test_the_same_traffic_elsewhere(where: EngineConfiguration, tmp_path: Path) -> None:
    found = conversed(where, tmp_path, **TRAFFIC)
    assert (found["wrong"], found["far"]) == (0, [])


@larger
@pytest.mark.parametrize(
    ("where", "num_drafted"),
    [(V1, 1), (V1, 2), (V1, 3), (V1, 4), (V2_ASYNC, 2)],
    ids=lambda value: str(value),
)
def test_hits_behind_blocks_that_were_filled_while_decoding(
    where: EngineConfiguration, num_drafted: int, tmp_path: Path
) -> None:
    found = conversed(where, tmp_path, **BOUNDARIES, num_drafted=num_drafted)
    assert (found["wrong"], found["far"]) == (0, [])
    block = found["block_tokens"]
    last = [answer["length"] // block * block == answer["cached"] for answer in found["answers"] if answer["turn"] % 2]
    assert sum(last) > 8, "of the sixteen that begin behind a block's end"


@larger
def test_a_missing_copy_at_the_boundary_is_noticed(tmp_path: Path) -> None:
    """Negative control: the state is not copied to the block that ends; a hit goes on from an older one."""
    found = conversed(V1, tmp_path, **BOUNDARIES, change="boundary")
    assert len(found["far"]) > 8
    assert all(turn > 0 for turn, _ in found["far"])


@larger
def test_preempted_in_between(tmp_path: Path) -> None:
    found = conversed(V1, tmp_path, **BOUNDARIES, num_blocks=22)
    assert found["preemptions"] > 0
    assert (found["wrong"], found["far"]) == (0, [])
