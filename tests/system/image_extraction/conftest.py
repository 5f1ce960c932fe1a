# SPDX-License-Identifier: Apache-2.0
"""Two servers that this folder's tests share, stock and then with the plugin; each is asked the same, in one order."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached

from tests.system.image_extraction import test_refusals, test_server

# The render endpoint's answer has the order of a set in it, and the line at start is an information; in a whole run
# the tests that share engines have asked for warnings alone.
ENV = {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "INFO"}
ARGS = (
    *CPU_ARGS, "--served-model-name", test_server.MODEL, "--limit-mm-per-prompt", '{"image": 4}',
    "--enable-prefix-caching", "--trust-request-mm-kwargs", "--enable-scale-out", "--enable-auto-tool-choice",
    "--tool-call-parser", "refuses", "--tool-parser-plugin", str(Path(__file__).with_name("tool_parser.py")),
)  # fmt: skip


class Said(NamedTuple):
    """What a server said to test_refusals.py's requests, and what it generated and fetched; and to test_server.py's."""

    refusals: dict[str, tuple[tuple[int, Any, Any], float]]
    fetched: dict[str, tuple[tuple[int, Any, Any], list[str]]]
    answers: dict[str, list[Any]]


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="package")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What stock vLLM says; its server has ended when the plugin's starts."""
    log_path = tmp_path_factory.mktemp("log") / "log"
    with serve(model, log_path=log_path, env={**ENV, "MMCACHE_DISABLE": "1"}, args=ARGS) as server:
        assert not test_server.counters(server.url)
        refusals, fetched = test_refusals.seen(server.url), test_refusals.fetched(server.url)
        return Said(refusals, fetched, test_server.answers(server.url))


@pytest.fixture(scope="package")
def url(stock: Said, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log_path = tmp_path_factory.mktemp("log") / "log"
    with serve(model, log_path=log_path, env=ENV, args=ARGS) as server:
        assert re.search(r" in force: .*lazy_media, image_extraction", log_path.read_text())
        assert test_server.counters(server.url)["images_lifted"] == 0
        yield server.url


@pytest.fixture(scope="package")
def plugin(url: str) -> Said:
    refusals, fetched = test_refusals.seen(url), test_refusals.fetched(url)
    counted = test_server.counters(url)
    assert counted["images_lifted"] >= len(refusals)
    assert counted["bodies_failed"] == 0
    return Said(refusals, fetched, test_server.answers(url))


def pytest_itemcollected(item: pytest.Item) -> None:
    """One worker runs all of this folder, since its tests share servers."""
    item.add_marker(pytest.mark.xdist_group("image_extraction"))
