# SPDX-License-Identifier: Apache-2.0
"""The flags of the recipes, on real servers: answers are stock's, cold and warm, and the components are on.

Encoder data parallel and the processor cache in shared memory, two tensor-parallel ranks, two data-parallel engines
behind one port, two API servers. `make matrix` runs them (TEST_MATRIX=1).
"""

from pathlib import Path

import pytest

from tests.support.deployment import TWO_RANKS, Answer, Deployment, deployed
from tests.support.engine_configuration import CHOSEN
from tests.support.sizes import larger
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES

pytestmark = [pytest.mark.engine, larger]

SHM = ("--mm-processor-cache-type", "shm")
ENCODER_DATA = ("--mm-encoder-tp-mode", "data")
TWO_ENGINES = ("--data-parallel-size", "2")
TWO_SERVERS = ("--api-server-count", "2")
NOT_ON = {"image_spans", "observe"}  # an image of Qwen3-VL sees what came before it; nobody asked to observe

CASES = {
    "tp2": TWO_RANKS,
    "shm": SHM,
    "encoder-data-shm": (*TWO_RANKS, *ENCODER_DATA, *SHM),
    "api2": TWO_SERVERS,
    "dp2": TWO_ENGINES,
    "pp2": ("--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp"),
    "dp2-api2": (*TWO_ENGINES, *TWO_SERVERS),
    "all": (*TWO_RANKS, *ENCODER_DATA, *SHM, *TWO_ENGINES, *TWO_SERVERS),
}


def assert_exact(server: Deployment, stock: list[Answer]) -> None:
    """Cold, as prefix hits, with features alone, and about another picture, wherever the balancer sends them."""
    cold = server.ask(0)
    assert cold.equals(stock[0])
    assert cold.num_cached == 0
    again = [server.ask(0) for _ in range(4)]
    assert all(answer.equals(stock[0]) for answer in again)
    assert sum(answer.num_cached > 0 for answer in again) >= 3, "but for the first of the other engine"
    assert all(server.ask(1).equals(stock[1]) for _ in range(4))
    assert not server.ask(1).equals(stock[0]), "the comparison sees another picture"
    server.forget()
    before = server.total("tower_images_avoided")
    after = [server.ask(number) for number in (0, 1)]
    assert [answer.equals(expected) for answer, expected in zip(after, stock, strict=False)] == [True, True]
    assert server.total("tower_images_avoided") > before


@pytest.mark.parametrize("name", CASES)
def test_flags(model: Path, stock: list[Answer], tmp_path: Path, name: str) -> None:
    if name == "pp2" and CHOSEN.runner == 1:
        pytest.skip("vLLM's runner V1 does not run pipeline stages on the CPU: its second stage asserts")
    with deployed(model, tmp_path / "log", *CASES[name]) as server:
        components = server.components()
        assert {component for component in COMPONENT_NAMES if components[component][0] != "on"} - NOT_ON <= {
            component for component in COMPONENT_NAMES if components[component][0] == "unneeded"
        }, components
        assert len(set(server.in_force())) == 1
        assert_exact(server, stock)
