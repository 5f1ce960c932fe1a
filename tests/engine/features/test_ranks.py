# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks and one copy of the features, which both take from the engine's memory.

Were one rank to run its tower alone, its layers would wait for the other for ever.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig

from tests.support.deployment import plant
from tests.support.sizes import larger
from tests.support.towers import ask_about, slots, spoil
from vllm_mmcache.base import status
from vllm_mmcache.exactness.answers import Inexact
from vllm_mmcache.prove import workers

pytestmark = pytest.mark.engine

# What the second rank's tower gives when it is tried is not what the first one's gives.
UNLIKE = """
probe = module.probe
def of_another(vllm_config, model, tower, device):
    embed = model.embed_multimodal
    model.embed_multimodal = lambda **inputs: [2 * features for features in embed(**inputs)]
    try:
        return probe(vllm_config, model, tower, device)
    finally:
        del model.embed_multimodal
module.probe = of_another
"""


def two_ranks(mode: str) -> EngineConfig:
    """An engine whose tower is split over two ranks by weights, or by images."""
    more = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "mm_encoder_tp_mode": mode}
    return EngineConfig("qwen3-vl", more=tuple(more.items()))


@pytest.fixture
def ranks(alone: EnginePool, monkeypatch: pytest.MonkeyPatch) -> Iterator[EnginePool]:
    """The pool, for engines with workers of their own."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to the workers
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM would bind each rank to a NUMA node of its own
    yield alone
    alone.close()


def runs(rig: ZooRig) -> list[int]:
    """Images that each rank's tower has run for."""
    return list(rig.in_workers(workers.tower_images))


@pytest.mark.parametrize(
    "mode", [pytest.param("weights", marks=pytest.mark.any_engine), pytest.param("data", marks=larger)]
)
def test_one_copy(ranks: EnginePool, mode: str) -> None:
    rig = ranks.get(two_ranks(mode))
    start = runs(rig)
    answers = ask_about(rig, 700, 701)
    assert runs(rig) == [count + 2 for count in start]
    assert len(slots(rig)) == 2
    rig.forget_all_but_features()
    answers += ask_about(rig, 700, 701)
    assert runs(rig) == [count + 2 for count in start]
    assert len(slots(rig)) == 2
    rig.make_cold()  # what is lost is lost for both
    answers += ask_about(rig, 700)
    assert runs(rig) == [count + 3 for count in start]
    rig.assert_exact(answers)
    assert spoil(rig) == 1  # the control: both take it from there
    rig.forget_all_but_features()
    with pytest.raises(Inexact):
        rig.assert_exact(ask_about(rig, 700))
    assert runs(rig) == [count + 3 for count in start]


def test_a_rank_whose_tower_gives_other_features(
    ranks: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy would be right for both, so there is none. The control is the test above."""
    path = plant(tmp_path / "site", "vllm_mmcache.components.features.worker.opening", "VllmWorker-1", UNLIKE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]))
    rig = ranks.get(two_ranks("weights"))
    assert rig.features is None
    found = status.of("engine")["features"]
    assert (found.state, found.reason) == (
        "off",
        "what the vision tower makes of an image is not the same in all ranks",
    )
    start = runs(rig)
    answers = []
    for number_of_runs in (1, 2):
        rig.forget_all_but_features()
        answers += ask_about(rig, 700)
        assert runs(rig) == [count + number_of_runs for count in start]
    rig.assert_exact(answers)
