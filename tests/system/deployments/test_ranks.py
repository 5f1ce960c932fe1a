# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks that differ: a component that is off in one is off in all, and the report says which."""

import time
from pathlib import Path

import httpx
import pytest

from tests.support.deployment import TWO_RANKS, Answer, Deployment, deployed, plant, refused
from tests.support.sizes import larger
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES, parts

pytestmark = pytest.mark.engine

# What one rank finds out by itself, and what it finds out only when all have run the vision tower.
UNFIT = {
    "before the tower runs": """
module.why_not = lambda runner: "it is unlike the others, says a test"
""",
    "after": """
from vllm_mmcache.components.features.worker.vllm_probe import Unsupported
probe = module.probe
def unlike(*args):
    probe(*args)
    raise Unsupported("it is unlike the others, says a test")
module.probe = unlike
""",
}
NEVER = "module.register = lambda: None"


def assert_exact(server: Deployment, stock: list[Answer]) -> None:
    """Cold, as a prefix hit, and with features alone."""
    assert server.ask(0).equals(stock[0])
    again = server.ask(0)
    assert again.equals(stock[0])
    assert again.num_cached > 0
    server.forget()
    assert server.ask(0).equals(stock[0])
    assert server.ask(1).equals(stock[1])


@larger
def test_alike(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    """Negative control of the others."""
    with deployed(model, tmp_path / "log", *TWO_RANKS) as server:
        components = server.components()
        assert components["features"] == ("on", "")
        (line,) = server.in_force()
        assert "features" in line.partition(";")[0]
        assert_exact(server, stock)
        assert server.total("tower_images_avoided") == 1  # of the rank that answers the engine


@pytest.mark.parametrize("found", ["before the tower runs", pytest.param("after", marks=larger)])
def test_a_component_is_off_in_one_rank(model: Path, stock: list[Answer], tmp_path: Path, found: str) -> None:
    path = plant(tmp_path / "site", "vllm_mmcache.components.features.worker.opening", "VllmWorker-1", UNFIT[found])
    with deployed(model, tmp_path / "log", *TWO_RANKS, paths=[path]) as server:
        reason = "it is unlike the others, says a test (worker 1)"
        assert server.components()["features"] == ("off", reason)
        (line,) = server.in_force()
        assert f"off: features ({reason})" in line
        assert "mmcache: off in all ranks: features: it is unlike the others" in server.log()
        assert server.components()["block_keys"] == ("on", "")
        assert_exact(server, stock)
        assert server.total("tower_images_avoided") == 0


@larger
def test_one_rank_without_us(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    path = plant(tmp_path / "site", "vllm_mmcache.plugin", "VllmWorker-1", NEVER)
    with deployed(model, tmp_path / "log", *TWO_RANKS, paths=[path]) as server:
        components = server.components()
        assert set(components) == set(COMPONENT_NAMES)
        on = {component for component, (state, _) in components.items() if state == "on"}
        assert not on & set(parts("worker"))
        assert {"identity", "block_keys", "lazy_media"} <= on
        assert "it has no mmcache (worker 1" in components["features"][1]
        assert_exact(server, stock)
    said = refused(model, tmp_path / "refused", *TWO_RANKS, paths=[path])
    assert "require_salt is set, but mmcache is not in worker 1 of engine 0" in said


@larger
def test_a_rank_that_fails_in_a_step_ends_the_engine(model: Path, tmp_path: Path) -> None:
    """vLLM drops its error, and the other one would wait for it for five minutes, or take its next step for this one.

    The control is in the same deployment: requests are answered until it fails.
    """
    code = """
def load(self, places):
    if places:
        raise MemoryError("no memory on this rank, says a test")
    return stock(self, places)
stock, module.DeviceCopies.load = module.DeviceCopies.load, load
"""
    path = plant(tmp_path / "site", "vllm_mmcache.components.features.worker.device_copies", "VllmWorker-1", code)
    with deployed(model, tmp_path / "log", *TWO_RANKS, paths=[path]) as server:
        assert server.ask(0).num_cached == 0
        assert server.ask(0).num_cached > 0
        server.forget()
        begun = time.monotonic()
        with pytest.raises(httpx.HTTPError):
            server.ask(0)
        server.process.wait(60)
        assert time.monotonic() - begun < 60
        assert "features failed on this rank, and the engine can't go on without it" in server.log()
