# SPDX-License-Identifier: Apache-2.0
"""A server whose engine nobody has tried tries it before it is healthy, and keeps what it has found."""

import re
from pathlib import Path

import pytest

from tests.support.deployment import TWO_RANKS, Answer, deployed, plant
from tests.support.sizes import larger
from tests.system.deployments.test_servers import NO_TABLE
from vllm_mmcache.reference_attention.comparison import KINDS

pytestmark = pytest.mark.engine

SHIFTED = """
take = module.RankFeatures._take
def wrong(self, places, outputs):
    names = take(self, places, outputs)
    for name in names:
        outputs[name].copy_(outputs[name].roll(1, 0))
    return names
module.RankFeatures._take = wrong
"""

# Of the tokens that an answer is made of, in one rank: its half of the heads gives something else.
WRONG_KERNEL = """
forward = module.CPUAttentionBackendImpl.forward
def wrong(self, layer, query, *args, **kwargs):
    output = forward(self, layer, query, *args, **kwargs)
    return output.mul_(1.5) if len(query) == 1 else output
module.CPUAttentionBackendImpl.forward = wrong
"""
KERNEL = "vllm.v1.attention.backends.cpu_attn"


def test_what_is_wrong_is_off_and_the_rest_is_proven(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    untried = plant(tmp_path / "untried", *NO_TABLE)
    wrong = plant(tmp_path / "wrong", "vllm_mmcache.components.features.worker.rank", ".*", SHIFTED)
    variables = {"XDG_STATE_HOME": str(tmp_path / "state"), "MMCACHE_TRIAL_S": "300"}
    with deployed(model, tmp_path / "log", paths=[wrong], MMCACHE_TRIAL_ALL="1", **variables) as server:
        components = server.components()
        assert components["features"][0] == "off"
        assert components["features"][1].startswith("its trial on this engine was not exact: an answer with both")
        assert components["block_keys"] == components["metrics"] == ("on", "")
        assert "trial of this engine: " in server.log()
        counted = {name: value for (name, _), value in server.metrics().items() if name.startswith("mmcache:tower_")}
        counted = {name: value for name, value in counted.items() if name.endswith("_total")}
        assert set(counted.values()) == {0.0}, "what the trial did is not counted"
        for number in (0, 1, 0):
            assert server.ask(number).equals(stock[number])
    with deployed(model, tmp_path / "log again", paths=[untried], **variables) as server:
        assert "mmcache: trying features on this engine" in server.log(), "what had passed is known"
        assert server.components()["features"] == server.components()["block_keys"] == ("on", "")
        assert server.ask(0).equals(stock[0])
    with deployed(model, tmp_path / "log at last", paths=[untried], **variables) as server:
        assert "mmcache: trying" not in server.log()
        assert server.components()["features"] == ("on", "")


@larger
@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_attention_of_each_rank_is_computed_anew(model: Path, tmp_path: Path, is_wrong: bool) -> None:
    """Each rank has half of the heads. Where one of them is wrong, warm and cold alike, no answers differ."""
    variables = {"XDG_STATE_HOME": str(tmp_path / "state"), "MMCACHE_TRIAL_S": "300", "MMCACHE_TRIAL_ALL": "1"}
    paths = [plant(tmp_path / "wrong", KERNEL, "VllmWorker-1", WRONG_KERNEL)] if is_wrong else []
    with deployed(model, tmp_path / "log", *TWO_RANKS, paths=paths, **variables) as server:
        (rows,) = re.findall("attention computed anew: rows (.*)", server.log())
        assert all(re.search(rf"\d+ \({kind}\)", rows) for kind in KINDS), rows
        said = re.findall("not what its naive form gives: (.*?)\\. Answers may be wrong", server.log())
        assert len(said) == is_wrong
        assert all("decode" in what and "layer" in what for what in said), said
        assert server.components()["features"] == server.components()["block_keys"] == ("on", "")
