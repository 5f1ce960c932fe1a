# SPDX-License-Identifier: Apache-2.0
"""One turn as a client sends it: serialised before the clock starts, timed until the first token is back."""

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.servers import MODEL

PATH = "/v1/chat/completions"
MARK = "the question goes here"
TIMEOUT_S = 300


@dataclass(frozen=True)
class Talk:
    """A serialised conversation: all its images, and a gap for the question of the turn."""

    head: bytes
    tail: bytes

    def body(self, question: str) -> tuple[bytes, ...]:
        """The pieces of the body of one turn; the images are not copied."""
        return self.head, json.dumps(question)[1:-1].encode(), self.tail


def talk(parts: Sequence[dict[str, Any]]) -> Talk:
    """A conversation about these image parts, streamed, with one token as the answer."""
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": MARK}]}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
    }
    head, _, tail = json.dumps(request).encode().partition(MARK.encode())
    return Talk(head, tail)


def image_part(url: str | None, uuid: str | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url} if url else None}
    return {**part, "uuid": uuid} if uuid else part


def first_token_s(url: str, body: Sequence[bytes]) -> float:
    """Seconds from the first byte sent to the first event received. Raises: RuntimeError with a refusal's text."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)
    headers = {"content-type": "application/json", "content-length": str(sum(map(len, body)))}
    connection.connect()
    start = time.perf_counter()
    connection.request("POST", PATH, body=iter(body), headers=headers)
    answer = connection.getresponse()
    line = answer.readline()
    seconds = time.perf_counter() - start
    rest = answer.read()
    connection.close()
    if answer.status != 200 or not line.startswith(b"data:") or b'"error"' in line:
        raise RuntimeError(f"{url} answered {answer.status}: {(line + rest)[:500]!r}")
    return seconds
