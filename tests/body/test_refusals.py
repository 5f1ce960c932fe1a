# SPDX-License-Identifier: Apache-2.0
"""A real server refuses before and after it has generated: answers as stock's, and no generation is done twice."""

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.body.test_server import ENV, MODEL, ask, chat, counters, differences, image_url, picture
from tests.features.tiers import LONG_S, within
from vllm_mmcache.demo.server import CPU_ARGS, Server, serve
from vllm_mmcache.zoo import build_cached

pytestmark = pytest.mark.engine

ARGS = (
    *CPU_ARGS, "--served-model-name", MODEL, "--limit-mm-per-prompt", '{"image": 4}', "--enable-auto-tool-choice",
    "--tool-call-parser", "refuses", "--tool-parser-plugin", str(Path(__file__).with_name("tool_parser.py")),
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def requests() -> dict[str, tuple[dict[str, Any], int, bool]]:
    """Name -> (request, status, whether the engine generates for it)."""
    a = image_url(picture("a"))
    return {
        "answered": (chat(a), 200, True),
        "refused after it was generated": (chat(a, tools=TOOLS), 400, True),
        "two refused after they were generated": (chat(a, tools=TOOLS, n=2, temperature=1), 400, True),
        "too many images": (chat(*[a] * 5), 400, False),
        "a wrong field": (chat(a, temperature=-3), 400, False),
        "too long": (chat(a, {"type": "text", "text": "word " * 20_000}), 400, False),
    }


REQUESTS = requests()


def num_generated(url: str) -> float:
    """Tokens generated since the server's start, by vLLM's own counter, once it stands still."""
    counts = [-1.0]
    while len(counts) < 2 or counts[-1] != counts[-2]:
        time.sleep(0.2)  # vLLM counts a moment after it has answered
        shown = httpx.get(url + "/metrics", timeout=60).text
        found = re.findall(r"^vllm:generation_tokens_total{.*} (\S+)$", shown, re.MULTILINE)
        counts.append(sum(map(float, found)))
    return counts[-1]


def seen(server: Server) -> dict[str, tuple[tuple[int, Any, Any], float]]:
    """Name -> (answer, how many tokens the engine generated for it)."""
    found = {}
    for name, (request, _, is_generated) in REQUESTS.items():
        before = num_generated(server.url)
        answer = ask(server.url, "/v1/chat/completions", request)
        if is_generated:  # else the count stands still because it has not begun to move
            within(LONG_S, lambda before=before: num_generated(server.url) > before)  # type: ignore[misc]
        found[name] = (answer, num_generated(server.url) - before)
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What stock vLLM does, and what it does with the plugin."""
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    log_path = tmp_path_factory.mktemp("log") / "log"
    with serve(model, log_path=log_path, env={**ENV, "MMCACHE_DISABLE": "1"}, args=ARGS) as server:
        stock = seen(server)
    with serve(model, log_path=log_path, env=ENV, args=ARGS) as server:
        plugin = seen(server)
        counted = counters(server.url)
        assert counted["images_lifted"] >= len(REQUESTS)
        assert counted["bodies_failed"] == 0
    return stock, plugin


@pytest.mark.parametrize("name", REQUESTS)
def test_as_stock(name: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stock, plugin = both
    _, status, is_generated = REQUESTS[name]
    assert stock[name][0][0] == status, stock[name]
    assert (stock[name][1] > 0) == is_generated
    assert plugin[name][1] == stock[name][1]
    assert differences(plugin[name][0], stock[name][0]) == []
