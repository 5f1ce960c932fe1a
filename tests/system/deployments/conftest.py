# SPDX-License-Identifier: Apache-2.0
"""A model, what stock vLLM answers about it, which every deployment must answer, too, and the Rust frontend."""

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached

from tests.support.deployment import Answer, deployed

PICTURES = range(3)
WHEELS = Path(__file__).parents[3] / ".artifacts" / "wheels"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Cold answers about pictures 0, 1 and 2, without the plugin. Different ones, so a wrong picture would be seen."""
    log = tmp_path_factory.mktemp("stock") / "log"
    with deployed(model, log, MMCACHE_DISABLE="1") as server:
        assert not server.metrics()
        answers = []
        for number in PICTURES:
            answers.append(server.ask(number))
            server.forget()
    assert not re.search(r"\bmmcache\b", server.log())
    assert not any(answer.num_cached for answer in answers)
    assert not answers[0].equals(answers[1])
    assert not answers[1].equals(answers[2])
    return answers


@pytest.fixture(scope="session")
def rust(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Variables that choose the Rust frontend. CPU wheels are without its program; that of the CUDA wheel runs here."""
    wheels = sorted(WHEELS.glob("vllm-0.32.0-*.whl"))
    if not wheels:
        pytest.skip("no wheel of vLLM 0.32.0 here; `make check-upstream` fetches it")
    with zipfile.ZipFile(wheels[0]) as archive:
        program = Path(archive.extract("vllm/vllm-rs", tmp_path_factory.mktemp("rust")))
    program.chmod(0o755)
    return {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(program)}


def pytest_itemcollected(item: pytest.Item) -> None:
    """One worker runs all of this folder, since its tests share servers."""
    item.add_marker(pytest.mark.xdist_group("deployments"))
