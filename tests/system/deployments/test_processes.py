# SPDX-License-Identifier: Apache-2.0
"""Which roles a process has, forked, spawned or alone: each says its own line, and decides anew what it inherited."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import environment, plant, waited_for
from tests.support.sizes import larger
from vllm_mmcache.base.role import Role
from vllm_mmcache.lifecycle.registry import parts

pytestmark = pytest.mark.engine

BODY = """
import json, os
from vllm import LLM, SamplingParams
from vllm_mmcache.base import status

def main():
    llm = LLM({model!r}, enforce_eager=True, block_size=32, max_model_len=256, dtype="float32", {more})
    answer = llm.generate("red cat", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids
    places = {{place: {{component: one.state for component, one in states.items()}} for place, states in
    status.places().items()}} print("found:", json.dumps([list(answer), status.roles(), status.process_name(), places]))
"""
# Unguarded: a spawned process would run the program again, in its turn.
FORKED = BODY + "\nmain()\n"
GUARDED = BODY + "\nif __name__ == '__main__':\n    main()\n"
# On the CPU vLLM spawns; elsewhere it forks where it can.
KEEP_FORK = """
import os
check = module.CpuPlatform.check_and_update_config.__func__
def check_and_fork(cls, vllm_config):
    check(cls, vllm_config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
module.CpuPlatform.check_and_update_config = classmethod(check_and_fork)
"""
ONE_EACH = {"distributed_executor_backend": "mp"}


def run(
    tmp_path: Path, model: Path, program: str, more: dict[str, Any], paths: list[Path], **variables: str
) -> tuple[list[Any], dict[str, set[str]], str]:
    """What the program found; the roles of each process that said what it prepared; all that was said."""
    path = tmp_path / "program.py"
    path.write_text(program.format(model=str(model), more=", ".join(f"{k}={v!r}" for k, v in more.items())))
    environ = environment(paths, variables)
    done = subprocess.run([sys.executable, str(path)], env=environ, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert not waited_for(environ["TEST_DEPLOYMENT"])
    (line,) = re.findall(r"^found: (.*)$", said, re.MULTILINE)
    roles: dict[str, set[str]] = {}
    for process, role in re.findall(
        r"^(\(.*?pid=\d+\))?.*mmcache \S+ \[(\w+)\] on vLLM .*: prepared", said, re.MULTILINE
    ):
        roles.setdefault(process.partition(" ")[0].strip("("), set()).add(role)
    return json.loads(line), roles, said


@larger
def test_forked_spawned_and_alone(tmp_path: Path, model: Path) -> None:
    answers = []
    keeps_fork = plant(tmp_path / "site", "vllm.platforms.cpu", ".*", KEEP_FORK)
    runs: dict[str, tuple[str, dict[str, str], list[Path], dict[str, str]]] = {
        "fork": (FORKED, ONE_EACH, [keeps_fork], {}),
        "spawn": (GUARDED, ONE_EACH, [], {}),
        "alone": (GUARDED, {"distributed_executor_backend": "uni"}, [], {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    }
    for name, (program, more, paths, variables) in runs.items():
        found, roles, said = run(tmp_path, model, program, more, paths, **variables)
        answer, roles_here, name_here, places = found
        answers.append(answer)
        assert name_here == "api"
        assert set(places) == {"api", "engine 0", "worker 0 of engine 0"}
        of: dict[str, Role] = {"api": "api", "engine 0": "engine", "worker 0 of engine 0": "worker"}
        for place, role in of.items():
            assert set(places[place]) == set(parts(role)), (name, place)
        assert len(re.findall("mmcache .* in force: ", said)) == 1
        if name == "alone":
            assert roles_here == ["api", "engine", "worker"]
            assert roles == {"MainProcess": {"api", "engine", "worker"}}
        else:
            assert roles_here == ["api"]
            assert roles == {"MainProcess": {"api"}, "EngineCore": {"engine"}, "VllmWorker-0": {"worker"}}
    assert answers[0] == answers[1] == answers[2]
