# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks and one copy of the features, which both take from the engine's memory.

Were one rank to run its tower alone, its layers would wait for the other for ever.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig

from tests.support.deployment import plant
from tests.support.sizes import larger
from tests.support.towers import ask_about, slots, spoil
from vllm_mmcache.base import status
from vllm_mmcache.exactness.answers import Inexact
from vllm_mmcache.trial.worker import tower_images

pytestmark = pytest.mark.engine

# What the second rank's tower gives when it is tried is not what the first one's gives.
UNLIKE = """
probe = module.probe
def of_another(vllm_config, model, *more):
    embed = model.embed_multimodal
    model.embed_multimodal = lambda **inputs: [2 * features for features in embed(**inputs)]
    try:
        return probe(vllm_config, model, *more)
    finally:
        del model.embed_multimodal
module.probe = of_another
"""
# The second rank can't make the images that towers are tried with; the first one's would wait for it.
UNABLE = """
def unable(vllm_config, model, modality):
    raise RuntimeError("no such file on this host, says a test")
module.trial_inputs = unable
"""
OURS = "vllm_mmcache.components.features"
OPENING = "vllm_mmcache.components.features.worker.opening"


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


def left_open(worker: Any) -> list[str]:
    """What a rank has of a store: its memory, threads and connector."""
    memory = ["memory" for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:vllm-mmcache" in line]
    names = [one.name for one in threading.enumerate() if one.name in ("mmcache-copies", "mmcache-weights")]
    connectors = [name for name, one in vars(worker.model_runner).items() if type(one).__module__.startswith(OURS)]
    return memory + names + connectors


def runs(rig: ZooRig) -> list[int]:
    """Images that each rank's tower has run for."""
    return list(rig.in_workers(tower_images))


@pytest.mark.parametrize(
    "mode", [pytest.param("weights", marks=pytest.mark.any_engine), pytest.param("data", marks=larger)]
)
def test_one_copy(ranks: EnginePool, mode: str) -> None:
    rig = ranks.get(two_ranks(mode))
    assert rig.in_workers(left_open)[0][0] == "memory"  # the control of the test below
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


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (UNLIKE, "what the vision tower makes of an image is not the same in all ranks"),
        (UNABLE, r"could not be tried with two images: no such file on this host, says a test (worker 1)"),
    ],
    ids=["gives other features", "has nothing to try its tower with"],
)
def test_a_rank_that_is_unlike_the_other(
    ranks: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str, said: str
) -> None:
    """No copy would be right for both, so there is none, and nothing of it stays. The control is the test above."""
    path = plant(tmp_path / "site", OPENING, "VllmWorker-1", planted)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]))
    rig = ranks.get(two_ranks("weights"))
    assert rig.features is None
    found = status.of("engine")["features"]
    assert found.state == "off"
    assert found.reason.endswith(said)
    assert rig.in_workers(left_open) == [[], []]
    start = runs(rig)
    answers = []
    for number_of_runs in (1, 2):
        rig.forget_all_but_features()
        answers += ask_about(rig, 700)
        assert runs(rig) == [count + number_of_runs for count in start]
    rig.assert_exact(answers)
