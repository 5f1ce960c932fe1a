# SPDX-License-Identifier: Apache-2.0
"""A real server refuses before and after it has generated: answers as stock's, and no work is done twice.

Work is what the engine generates, and what is fetched from a server that counts.
"""

from __future__ import annotations

import base64
import http.server
import json
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support import files
from tests.support.tiers import LONG_S, within
from tests.system.image_extraction.test_server import ask, chat, differences, encoded, image_url, picture

if TYPE_CHECKING:
    from tests.system.image_extraction.conftest import Said

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


PAGES = {"/image.png": base64.b64decode(picture("at a url")), "/text": b"This is no image."}


class Fetches:
    """A server for media that counts what it is asked for. Use as a context."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        fetched = self.paths

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fetched.append(self.path)
                content = PAGES.get(self.path)
                self.send_response(404 if content is None else 200)
                self.send_header("content-length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Fetches:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def fetching_requests(url: str) -> dict[str, tuple[dict[str, Any], int, list[str]]]:
    """Name -> (request, status, what is fetched for it); each has an image in its body, too."""
    here = image_url(picture("refused"))
    broken = image_url(encoded(files.bad()["no image"] + b"\0" * 6400))

    def there(path: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url + path}}

    return {
        "answered": (chat(here, there("/image.png")), 200, ["/image.png"]),
        "no image at the url": (chat(here, there("/text")), 400, ["/text"]),
        "no image at the url, and one": (chat(here, there("/image.png"), there("/text")), 400, ["/image.png", "/text"]),
        "nothing at the url": (chat(here, there("/nothing")), 422, ["/nothing"]),
        "a broken image beside a url": (chat(broken, there("/image.png")), 400, ["/image.png"]),
        "too long": (
            chat(here, there("/image.png"), {"type": "text", "text": "word " * 20_000}), 400, ["/image.png"],
        ),
        "a wrong value": (chat(here, there("/image.png"), temperature=-3), 400, ["/image.png"]),
        "a value of a wrong type": (chat(here, there("/image.png"), max_tokens="many"), 400, []),
        "too many images": (chat(*[here] * 4, there("/image.png")), 400, []),
    }  # fmt: skip


FETCHING = list(fetching_requests(""))


def fetched(url: str) -> dict[str, tuple[tuple[int, Any, Any], list[str]]]:
    """Name -> (answer, what was fetched for it)."""
    found = {}
    with Fetches() as server:
        for name, (request, _, _) in fetching_requests(server.url).items():
            status, headers, answer = ask(url, "/v1/chat/completions", request)
            said = json.loads(json.dumps(answer).replace(server.url, "http://there"))
            found[name] = (status, headers, said), sorted(server.paths)
            server.paths.clear()
    return found


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


@pytest.mark.parametrize("name", FETCHING)
def test_nothing_is_fetched_twice(name: str, stock: Said, plugin: Said) -> None:
    """As often as stock does, which is once; and what is refused before is fetched by neither."""
    _, status, paths = fetching_requests("")[name]
    answer, fetched_by_stock = stock.fetched[name]
    assert (answer[0], fetched_by_stock) == (status, paths), answer
    assert differences(plugin.fetched[name][0], answer) == []
    assert plugin.fetched[name][1] == paths
