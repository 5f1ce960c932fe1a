# SPDX-License-Identifier: Apache-2.0
"""A second node that runs an engine alone, and has no mmcache: the head's report says so, or it refuses to start."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from mmcache_tools.harness.server import free_port

from tests.support.deployment import ARGS, Answer, command, deployed, environment, refused, start
from tests.support.sizes import larger
from vllm_mmcache.lifecycle.registry import parts

pytestmark = pytest.mark.engine


def group(rpc_port: int) -> tuple[str, ...]:
    """Arguments of both nodes."""
    return (
        "--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1",
        "--data-parallel-rpc-port", str(rpc_port),
    )  # fmt: skip


@contextlib.contextmanager
def second_node(model: Path, log_path: Path, rpc_port: int, **variables: str) -> Iterator[None]:
    args = (*ARGS, *group(rpc_port), "--data-parallel-start-rank", "1", "--headless")
    with start(log_path, command(model, *args), environment([], variables)):
        yield


@larger
def test_a_node_without_us(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    port = free_port()
    with (
        second_node(model, tmp_path / "node", port, VLLM_PLUGINS="none"),
        deployed(model, tmp_path / "log", *group(port)) as head,
    ):
        components = head.components()
        for component in {**parts("engine"), **parts("worker")}:
            assert "it has no mmcache (engine 1)" in components[component][1] or components[component][0] == "off", (
                component
            )
        assert components["block_keys"] == ("mixed", "on in engine 0; off: it has no mmcache (engine 1)")
        assert components["identity"] == ("on", "")
        (line,) = set(head.in_force())  # of two API servers, vLLM's default for two engines
        assert "block_keys (on in engine 0; off: it has no mmcache (engine 1))" in line
        for turn in range(8):
            assert head.ask(turn % 2).equals(stock[turn % 2])
    assert "mmcache" not in (tmp_path / "node").read_text().replace(str(model), "").replace("vllm_mmcache.cli", "")
    port = free_port()
    with second_node(model, tmp_path / "node2", port, VLLM_PLUGINS="none"):
        said = refused(model, tmp_path / "refused", *group(port))
    assert "require_salt is set, but mmcache is not in engine 1" in said


@larger
def test_a_head_without_us(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    """Statistics that have our part would end the output of its one API server, which logs them."""
    port = free_port()
    with (
        second_node(model, tmp_path / "node", port),
        deployed(model, tmp_path / "log", *group(port), "--api-server-count", "1", VLLM_PLUGINS="none") as head,
    ):
        for turn in range(8):
            assert head.ask(turn % 2).equals(stock[turn % 2])
        assert not head.metrics()
    assert "output_handler failed" not in (tmp_path / "log").read_text()
    assert "mmcache: features are kept" in (tmp_path / "node").read_text()
