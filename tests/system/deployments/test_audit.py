# SPDX-License-Identifier: Apache-2.0
"""The audit of a real server: /metrics counts what it found, and what is wrong is switched off in all ranks.

The control of each is the other: a right server has matches alone, a spoiled one is found.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.deployment import TWO_RANKS, Answer, Deployment, deployed, plant
from tests.support.sizes import larger

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

# Features are kept as they are, and come back as others.
SPOILED = """
load = module.DeviceCopies.load
module.DeviceCopies.load = lambda self, places: [-features for features in load(self, places)]
"""
REASON = "3 answers in the audit were not those of cold runs"


def results(server: Deployment) -> dict[tuple[str, ...], float]:
    """What the audit has counted, by component and result."""
    return {labels: value for labels, value in shown(server).items() if value}


def shown(server: Deployment) -> dict[tuple[str, ...], float]:
    """What /metrics has of it, with what was never counted."""
    return {labels: value for (name, labels), value in server.metrics().items() if name == "mmcache:audit_total"}


def has_more(server: Deployment, before: float) -> bool:
    """Whether there are more results than before, of all components."""
    return sum(results(server).values()) > before


def wait(is_reached: Callable[[], bool]) -> None:
    """The engine audits when it has nothing else to do."""
    until = time.monotonic() + 60
    while not is_reached() and time.monotonic() < until:
        time.sleep(0.2)
    assert is_reached()


def test_a_right_server_matches(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    with deployed(model, tmp_path / "log", MMCACHE_AUDIT="1", MMCACHE_AUDIT_TIME="100") as server:
        assert results(server) == {}
        assert {("features", "mismatch"), ("block_keys", "mismatch")} <= shown(server).keys(), "before the first"
        for turn in range(4):
            number = turn % 2
            before = sum(results(server).values())
            assert server.ask(number).equals(stock[number])
            if turn >= 2:
                wait(partial(has_more, server, before))
        assert {result for _, result in results(server)} == {"match"}, results(server)
        assert "the audit looks at 1 of the requests" in server.log()
        assert "the audit found" not in server.log()


@pytest.mark.parametrize("arguments", [pytest.param((), id="alone"), pytest.param(TWO_RANKS, id="ranks", marks=larger)])
def test_spoiled_features_are_switched_off(
    model: Path, stock: list[Answer], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Whether the worker is in the engine's process or in one of its own."""
    module = "vllm_mmcache.components.features.worker.device_copies"
    path = plant(tmp_path / "site", module, "(EngineCore|VllmWorker).*", SPOILED)
    with deployed(
        model, tmp_path / "log", *arguments, paths=[path], MMCACHE_AUDIT="1", MMCACHE_AUDIT_TIME="100"
    ) as server:
        assert server.components()["features"] == ("on", "")
        for number in range(3):
            assert server.ask(number).equals(stock[number])
            server.forget()
            assert not server.ask(number).equals(stock[number])
            wait(partial(has_more, server, number))
            server.forget()
        assert results(server) == {("features", "mismatch"): 3}
        wait(lambda: server.components()["features"] == ("off", REASON))
        assert f"features is switched off: {REASON}" in server.log()
        assert f"features ({REASON})" in server.in_force()[-1]
        for number in range(3):
            server.forget()
            assert server.ask(number).equals(stock[number])
            assert server.ask(number).equals(stock[number])
