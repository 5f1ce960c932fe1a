# SPDX-License-Identifier: Apache-2.0
"""The Rust frontend of vLLM: no Python of ours is between clients and engines, and the report says so."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deployment import deployed, refused
from vllm_mmcache.lifecycle.registry import parts

pytestmark = pytest.mark.engine


def test_components_of_the_api_are_off(model: Path, rust: dict[str, Any], tmp_path: Path) -> None:
    with deployed(model, tmp_path / "log", **rust) as server:
        said = server.log()
        assert "mmcache: the Rust frontend (VLLM_USE_RUST_FRONTEND) runs no Python: off are" in said
        (line,) = [line for line in said.splitlines() if "runs no Python" in line]
        assert all(component in line for component in parts("api"))
        assert not server.in_force()
        body = {"model": "zoo", "prompt": "red cat", "max_tokens": 4, "temperature": 0}
        answers = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=60) for _ in range(2)]
        assert answers[0].raise_for_status().json()["choices"] == answers[1].json()["choices"]


def test_salts_are_required(model: Path, rust: dict[str, Any], tmp_path: Path) -> None:
    said = refused(model, tmp_path / "log", **rust)
    assert "require_salt is set, but the Rust frontend (VLLM_USE_RUST_FRONTEND) runs no Python" in said
    assert "Loading model" not in (tmp_path / "log").read_text(), "it is refused before there is an engine"
    assert "[engine]" not in (tmp_path / "log").read_text()
