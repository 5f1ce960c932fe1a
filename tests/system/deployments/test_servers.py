# SPDX-License-Identifier: Apache-2.0
"""Several API servers and several engines: each server shows the same report, and it says where a component is off."""

import os
import re
from pathlib import Path

import pytest

from tests.support.deployment import Answer, Deployment, deployed, plant
from tests.support.sizes import larger
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES

pytestmark = pytest.mark.engine

FAR = """
from vllm_mmcache.base.status import State
decide = module.decide
def far(component, *rest):
    return State("off", "not here, says a test") if component == "block_keys" else decide(component, *rest)
module.decide = far
"""


def settled(server: Deployment, stock: list[Answer]) -> None:
    """Ask until the load balancer has tried all engines: each question on its own connection, cold and warm."""
    for turn in range(8):
        assert server.ask(turn % 2).equals(stock[turn % 2])


def test_two_api_servers_and_two_engines(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    path = plant(tmp_path / "site", "vllm_mmcache.lifecycle.activation", "EngineCore_DP1", FAR)
    args = ("--api-server-count", "2", "--data-parallel-size", "2")
    with deployed(model, tmp_path / "log", *args, paths=[path]) as server:
        lines = server.all_in_force(2)
        assert len(lines) == 2
        assert len(set(lines)) == 1
        reason = "on in engine 0; off: not here, says a test (engine 1)"
        assert f"mixed: block_keys ({reason})" in lines[0]
        shown = [server.components() for _ in range(6)]  # whichever server answers
        assert all(one == shown[0] for one in shown)
        assert set(shown[0]) == set(COMPONENT_NAMES)
        assert shown[0]["block_keys"] == ("mixed", reason)
        assert shown[0]["features"] == ("on", "")
        assert len(set(re.findall(r"\((ApiServer_\d+|APIServer_\d+) pid", server.log()))) == 2
        settled(server, stock)


NO_TABLE = ("vllm_mmcache.lifecycle.tested_engines", ".*", "module.TABLE[:] = []")


@larger
def test_the_command_line_switches(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    """On an engine that nobody tried, with no variable set: in the API server, the engine and the worker."""
    path = plant(tmp_path / "site", *NO_TABLE)
    store = tmp_path / "store"
    said = f'{{"mmcache": {{"features": true, "lazy_media": false, "store": "{store}"}}}}'
    with deployed(model, tmp_path / "log", "--additional-config", said, paths=[path], MMCACHE_TRIAL_S="0") as server:
        components = server.components()
        assert {component for component, (state, _) in components.items() if state == "on"} == {"features", "identity"}
        assert components["lazy_media"] == ("off", "switched off by the setting lazy_media")
        assert components["image_extraction"] == ("off", "needs lazy_media, which is off")
        assert components["block_keys"][1].startswith("not yet proven on vLLM")
        assert "[worker] on" in server.log()
        assert server.ask(0).equals(stock[0])
        server.forget()
        assert server.ask(0).equals(stock[0])
    assert sum(len(files) for _, _, files in os.walk(store)) > 0


@larger
def test_unproven(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    """MMCACHE_UNPROVEN=1 switches on what fits; a setting's no wins over it, and the command line over variables."""
    path = plant(tmp_path / "site", *NO_TABLE)
    variables = {"MMCACHE_UNPROVEN": "1", "MMCACHE_FEATURES": "1", "MMCACHE_RESUMED_IMAGES": "0"}
    args = ("--additional-config", '{"mmcache": {"features": false}}')
    with deployed(model, tmp_path / "log", *args, paths=[path], **variables) as server:
        components = server.components()
        assert components["features"] == ("off", "switched off by the setting features")
        assert components["resumed_images"] == ("off", "switched off by the setting resumed_images")
        assert components["observe"][0] == "off"
        assert components["block_keys"] == components["metrics"] == ("on", "")
        loud = "WARNING .*MMCACHE_UNPROVEN is set: components are on that nobody has shown to be exact here"
        said = [line.split()[0] for line in server.log().splitlines() if re.search(loud, line)]
        assert sorted(said) == ["(APIServer", "(EngineCore", "(VllmWorker-0"]
        assert server.ask(0).equals(stock[0])
        assert server.ask(0).equals(stock[0])
