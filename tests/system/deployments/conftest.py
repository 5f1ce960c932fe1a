# SPDX-License-Identifier: Apache-2.0
"""Models, and what stock vLLM answers, which every deployment must answer, too."""

import re
from pathlib import Path

import pytest
from mmcache_tools.zoo import build_cached

from tests.support.deployment import Answer, deployed

PICTURES = range(3)


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


def pytest_itemcollected(item: pytest.Item) -> None:
    """One worker runs all of this folder, since its tests share servers."""
    item.add_marker(pytest.mark.xdist_group("deployments"))
