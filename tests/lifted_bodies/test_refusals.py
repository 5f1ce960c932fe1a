# SPDX-License-Identifier: Apache-2.0
"""A real server refuses before and after it has generated: answers as stock's, and no generation is done twice."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.features.tiers import LONG_S, within
from tests.lifted_bodies.test_server import ask, chat, differences, image_url, picture

if TYPE_CHECKING:
    from tests.lifted_bodies.conftest import Said

pytestmark = pytest.mark.engine

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def requests() -> dict[str, tuple[dict[str, Any], int, bool]]:
    """Name -> (request, status, whether the engine generates for it)."""
    a = image_url(picture("refused"))
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


def seen(url: str) -> dict[str, tuple[tuple[int, Any, Any], float]]:
    """Name -> (answer, how many tokens the engine generated for it)."""
    found = {}
    for name, (request, _, is_generated) in REQUESTS.items():
        before = num_generated(url)
        answer = ask(url, "/v1/chat/completions", request)
        if is_generated:  # else the count stands still because it has not begun to move
            within(LONG_S, lambda before=before: num_generated(url) > before)  # type: ignore[misc]
        found[name] = (answer, num_generated(url) - before)
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_as_stock(name: str, stock: Said, plugin: Said) -> None:
    _, status, is_generated = REQUESTS[name]
    expected, num_tokens = stock.refusals[name]
    assert expected[0] == status, expected
    assert (num_tokens > 0) == is_generated
    answer, num_generated_here = plugin.refusals[name]
    assert num_generated_here == num_tokens
    assert differences(answer, expected) == []
