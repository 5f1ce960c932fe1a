# SPDX-License-Identifier: Apache-2.0
"""Questions to one server, and what they cost: seconds, CPU of its processes, bytes to its engine, its own counters."""

import concurrent.futures
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.processes import server_cpu_s
from benchmarks.processor import probe
from benchmarks.servers import Talk, counters, first_token_s, image_part, question, talk, zoo_server
from vllm_mmcache.demo.server import Server

Picture = tuple[str, int]  # data URL, bytes of the file


@dataclass(frozen=True)
class Asked:
    """A server that is asked, and where its processes write what they do."""

    server: Server
    folder: Path


@contextlib.contextmanager
def measured_server(model: Path, side: str, args: Sequence[str], env: dict[str, str] | None = None) -> Iterator[Asked]:
    """A server of one side with the probe in its processes; settings of the plugin are in `env`."""
    with tempfile.TemporaryDirectory() as name:
        env = {probe.FOLDER: name, **(env or {})}
        with zoo_server(model, side, images=1, args=(*probe.OPTIONS, *args), env=env) as server:
            yield Asked(server, Path(name))


def about(picture: Picture) -> Talk:
    return talk([image_part(picture[0])])


def ask(asked: Asked, conversation: Talk) -> float:
    """Seconds to the first token of a new question."""
    return first_token_s(asked.server.url, conversation.body(question()))


def each(asked: Asked, conversations: Sequence[Talk]) -> dict[str, Any]:
    """One question about each, one after the other, and what they cost together."""
    with costs(asked, len(conversations)) as found:
        found["seconds"] = [ask(asked, one) for one in conversations]
    return found


def at_once(asked: Asked, conversations: Sequence[Talk]) -> float:
    """Seconds until the last of all these has its first token; the bodies are made before."""
    bodies = [one.body(question()) for one in conversations]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        start = time.perf_counter()
        list(pool.map(lambda body: first_token_s(asked.server.url, body), bodies))
        return time.perf_counter() - start


@contextlib.contextmanager
def costs(asked: Asked, num_questions: int) -> Iterator[dict[str, Any]]:
    """Yields what is filled at the block's end, each number for one question. Units: seconds, bytes."""
    found: dict[str, Any] = {}
    counted, before, cpu_s = counters(asked.server.url), probe.read(asked.folder), server_cpu_s(asked.server)
    yield found  # what it costs to ask for the counters is no question's
    cpu_now_s, after, counted_now = server_cpu_s(asked.server), probe.read(asked.folder), counters(asked.server.url)
    found["questions"] = num_questions
    found["spent"] = probe.difference(before, after, num_questions)
    found |= {f"{process}_cpu_s": (cpu_now_s[process] - cpu_s[process]) / num_questions for process in cpu_s}
    found["counted"] = {name: value - counted.get(name, 0.0) for name, value in counted_now.items()}


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One of several results of each(): times as median and quartiles, costs and bytes for one question, counts added.

    Raises: ValueError without a part.
    """
    if not parts:
        raise ValueError("nothing was asked: expected at least one round of questions")
    num = sum(part["questions"] for part in parts)

    def mean(value: Callable[[dict[str, Any]], float]) -> float:
        return sum(value(part) * part["questions"] for part in parts) / num

    counted = {name: sum(part["counted"].get(name, 0.0) for part in parts)
               for name in sorted({name for part in parts for name in part["counted"]})}  # fmt: skip
    return {
        "questions": num,
        **spread([second for part in parts for second in part["seconds"]]),
        "api_server_cpu_s": round(mean(lambda part: part["api_server_cpu_s"]), 5),
        "engine_cpu_s": round(mean(lambda part: part["engine_cpu_s"]), 5),
        "sent_bytes": round(mean(lambda part: part["spent"]["sent_bytes"])),
        "spent_s": {name: round(mean(lambda part, name=name: part["spent"][name]), 5)
                    for name in (*probe.KINDS, "transit", "transfer")},
        "counted": {name: round(value, 3) for name, value in counted.items() if value},
    }  # fmt: skip


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of seconds."""
    if len(seconds) < 2:
        return {"median_s": round(median(seconds), 4)}
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return {"median_s": round(median(seconds), 4), "quartiles_s": [round(low, 4), round(high, 4)]}
