# SPDX-License-Identifier: Apache-2.0
"""`mmcache prove` on the CPU engine, as users run it: what passes is kept, and a component that answers wrongly is not.

One component at a time, with few scenarios: an item takes a quarter to half a minute on two cores.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.zoo import architecture_of, build

from tests.support.sizes import larger
from vllm_mmcache.lifecycle import user_proofs
from vllm_mmcache.lifecycle.user_proofs import ProofScope

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# Features come back from the store with other values.
SPOIL = """
import wrapt

@wrapt.when_imported("vllm_mmcache.components.features.worker.device_copies")
def spoil(module):
    load = module.DeviceCopies.load
    module.DeviceCopies.load = lambda self, places: [features * -3 for features in load(self, places)]
"""


def prove(state: Path, *arguments: str, **more: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, what --json says, and what stderr says."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    command = [
        sys.executable,
        "-m",
        "vllm_mmcache.cli",
        "prove",
        "--short",
        "--json",
        "--rooms",  # the older name of --components, which means the same
        "features",
        *arguments,
    ]
    environ |= {"XDG_STATE_HOME": str(state), **more}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout or "[]"), done.stderr


@larger
def test_what_passes_is_proven_for_this_place_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, (verdict,), said = prove(tmp_path, "--families", "qwen3-vl", "--", "--block-size", "64")
    assert code == 0, said
    assert verdict["components"]["features"]["state"] == "proven"
    states = [(name, item["state"]) for name, item in verdict["items"].items()]
    assert states == [
        ("qwen3-vl, stock vLLM", "passed"),
        ("qwen3-vl, features", "passed"),
        ("qwen3-vl, all components", "passed"),
    ]
    assert {item["engine"]["block_tokens"] for item in verdict["items"].values()} == {64}, "the user's argument"
    place = ProofScope(**verdict["place"])
    assert (place.platform, place.architecture) == ("cpu", architecture_of("qwen3-vl"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert user_proofs.proven_components(place) == {"features"}
    (proof,), lines = user_proofs.read()
    assert (proof.how, proof.arguments, lines) == ("zoo family qwen3-vl", ("--block-size", "64"), [])
    for other in (replace(place, vllm="0.31.0"), replace(place, device="other"), replace(place, mmcache="9")):
        assert user_proofs.proven_components(other) == frozenset()
    assert "[2/3] qwen3-vl, features: passed: " in said
    assert f"On from the next start, for {place.architecture} on {place.device}: features." in said


def test_a_component_that_answers_wrongly_is_not_proven(tmp_path: Path) -> None:
    """Negative control of the whole command."""
    (tmp_path / "sitecustomize.py").write_text(SPOIL)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code, (verdict,), said = prove(tmp_path / "state", "--families", "qwen3-vl", PYTHONPATH=path)
    assert code == 1, said
    component = verdict["components"]["features"]
    assert component["state"] == "failed"
    assert component["reason"].startswith("use of features: log-probabilities differ by ")
    assert "features failed, " in said
    assert (
        not (tmp_path / "state" / "mmcache" / "proofs.json").exists()
        or not json.loads((tmp_path / "state" / "mmcache" / "proofs.json").read_text())["proofs"]
    )


@larger
def test_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold and warm against stock; its proof is for the architecture, and says whose model it was."""
    model = build("qwen3-vl", tmp_path / "model")
    code, (verdict,), said = prove(tmp_path, str(model), "--own", "--", "--enforce-eager", "--max-model-len", "2048")
    assert code == 0, said
    checks = verdict["items"]["model, features"]["checks"]
    for name in ("use of features", "cold: another image", "warm: the same again", "control: hits"):
        assert checks[name] == {"state": "passed"}
    assert {checks[f"control: {name}"]["state"] for name in ("other image", "spoiled KV")} == {"passed"}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (proof,), _ = user_proofs.read()
    assert (proof.how, proof.components) == (f"own model {model}", ("features",))
    assert proof.place.architecture == architecture_of("qwen3-vl")
