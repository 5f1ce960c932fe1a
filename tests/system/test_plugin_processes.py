# SPDX-License-Identifier: Apache-2.0
"""The plugin as vLLM loads it: engine in a process of its own, settings that travel there, one line per process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mmcache_tools.zoo import build_cached

from tests.support.engine_configuration import CHOSEN
from tests.support.sizes import larger

pytestmark = pytest.mark.engine

START = """
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM({model!r}, enforce_eager=True, block_size=32, max_model_len=256, dtype="float32", {more})
    print("answer:", llm.generate("red cat", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))


def start(tmp_path: Path, model: Path, more: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and all output of a program that runs an engine in a second process."""
    program = tmp_path / "program.py"
    program.write_text(START.format(model=str(model), more=more))
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MMCACHE_", "VLLM_"))}
    environ |= CHOSEN.environment() | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], env=environ | environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def answer(said: str) -> str:
    (line,) = [line for line in said.splitlines() if line.startswith("answer:")]
    return line


def test_processes(tmp_path: Path, model: Path) -> None:
    """On by default, in each process; what a disabled plugin says is in tests/system/deployments: nothing."""
    code, on = start(tmp_path, model)
    assert code == 0, on[-3000:]
    resumed = "resumed_images, " if CHOSEN.runner == 1 else ""
    for role, components in (
        ("api", "metrics, lazy_media, image_extraction, identity, lazy_processing; off: observe"),
        ("engine", f"block_keys, {resumed}image_checkpoints, features, metrics; off: observe"),
        ("worker", f"{resumed}features, metrics; unneeded: image_spans"),
    ):
        (line,) = [line for line in on.splitlines() if f" [{role}] on vLLM " in line]
        assert f": prepared: {components}" in line
    (line,) = [line for line in on.splitlines() if " in force: " in line]
    assert (
        f" in force: block_keys, {resumed}features, metrics, lazy_media, identity, lazy_processing; off: observe"
        in line
    )
    assert "image_checkpoints (this model keeps every block's KV)" in line
    assert "image_extraction (no server here)" in line
    assert "mmcache block keys: cumulative layout" in on


@larger
def test_switched_off(tmp_path: Path, model: Path) -> None:
    """Off by configuration, in the engine's process too; nothing at all when disabled; the answer is the same."""
    _, on = start(tmp_path, model)
    code, off = start(tmp_path, model, more='additional_config={"mmcache": {"block_keys": False}}')
    assert code == 0, off[-3000:]
    assert "block_keys (switched off by the setting block_keys)" in off
    assert "mmcache block keys" not in off

    code, disabled = start(tmp_path, model, MMCACHE_DISABLE="1")
    assert code == 0, disabled[-3000:]
    assert "mmcache" not in disabled.replace(str(model), "").replace(str(tmp_path), "")
    assert answer(on) == answer(off) == answer(disabled)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"mmcache": {"block_keys": "maybe"}}', "additional-config mmcache.block_keys = 'maybe' is not allowed"),
        ('{"mmcache": {"blokc_keys": True}}', "did you mean block_keys?"),
    ],
)
def test_wrong_configuration_stops_the_start(tmp_path: Path, model: Path, config: str, said: str) -> None:
    code, output = start(tmp_path, model, more=f"additional_config={config}")
    assert code != 0
    assert said in output
