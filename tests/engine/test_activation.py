# SPDX-License-Identifier: Apache-2.0
"""An engine that nothing was proven on runs without the components."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS

pytestmark = pytest.mark.usefixtures("nothing_stays_installed", "no_role")


@pytest.mark.engine
def test_an_engine_without_proof_runs_without_the_components(tmp_path: Path) -> None:
    """A real engine whose runner nobody tried: it says which components are off, and answers."""
    program = f"""
import json, pathlib
from vllm_mmcache.base import status
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle import tested_engines
tested_engines.TABLE[:] = []
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from vllm_mmcache.exactness.conversations import one, picture, user
from vllm_mmcache.lifecycle.registry import COMPONENTS, REPORT
pool = EnginePool(pathlib.Path({str(tmp_path)!r}))
rig = pool.get(EngineConfig("qwen2-vl"))
ask = user(picture(1), "What is it?")
answers = [one(rig, ask), one(rig, ask)]
same = answers[0].token_ids == answers[1].token_ids
states = {{component: state.state for component, state in status.in_force().items()}}
proven = tested_engines.ENGINE_COMPONENTS
others = {{hook.target for hook in REPORT.all_hooks()}}
members = [(component, hook) for component in proven for hook in COMPONENTS[component].all_hooks()]
replaced = [c for c, hook in members if hook.target not in others and installer.is_replaced(hook.target)]
print(json.dumps([same, answers[1].num_cached_tokens, states, rig.features is None, replaced]))
pool.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | CHOSEN.environment() | {"VLLM_LOGGING_LEVEL": "INFO", "MMCACHE_TRIAL_S": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    same, num_cached, states, without_features, replaced = json.loads(done.stdout.splitlines()[-1])
    assert same
    assert num_cached > 0
    assert without_features
    assert not replaced
    unneeded = {"image_spans", "inner_checkpoints"} | ({"resumed_images"} if CHOSEN.runner == 2 else set())
    assert {component: states[component] for component in ENGINE_COMPONENTS} == {
        component: "unneeded" if component in unneeded else "off" for component in ENGINE_COMPONENTS
    }
    said = done.stdout + done.stderr
    assert "block_keys (not yet proven on vLLM" in said
