# SPDX-License-Identifier: Apache-2.0
"""What an image costs at a replica that has never seen it, and how often a client is refused that alternates.

Two replicas share a Valkey, and a directory of clients' files. Both, the Valkey and the client have one machine, on
which the Valkey may wait for a processor; so reads from it may take longer than the setting's default.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
from mmcache_tools.zoo import build_cached

from benchmarks.pictures import SCREEN, SMALL, url_of
from benchmarks.probing import Probed, probed_server
from benchmarks.results import Result
from benchmarks.scenarios import Seen, settle
from benchmarks.servers import MODEL, PATH, Body, ask, image_part, request, stored
from vllm_mmcache.client import OnceTransport

ARGS = ("--enable-prefix-caching", "--max-model-len", "4096")
SHOWN = 3  # images of the last turns that a request still holds
PATIENT = {"MMCACHE_STORE_REMOTE_TIMEOUT_S": "0.5"}
REST_S = 0.5
PICTURES = 50  # that the conversation shows in turn

_numbers = itertools.count()


def measure(options: Namespace) -> Result:
    """First questions at the strange replica, and turns that alternate."""
    result = Result()
    for case, numbers in (
        ("a replica that has not seen an image", first_turns(options.images)),
        ("turns that alternate", refusals(options.turns)),
    ):
        for what, number in numbers.items():
            result.add(case, what, {"mmcache": number})
    return result


def first_turns(num_images: int) -> dict[str, float]:
    """What the first question about an image costs at a replica that another one shares its store with.

    The one has been asked about all images before, so that it has records and features. Each question has other words
    before its image, so that neither takes KV from its cache. `first_turn` is the median time to the first token at the
    strange replica by that at the other one; the rest are counts at the strange one. There is a rest before each
    question, since threads of a replica that has just answered still take processor time.
    """
    with stored("valkey") as store, replicas({"MMCACHE_STORE": store, **PATIENT}) as (known, strange):
        for up in (known, strange):
            for number in range(3):  # the first pictures of a size are slower
                ask(up.server.url, question(num_images + number))
        for number in range(num_images):
            ask(known.server.url, question(number))
        settle(known, Seen())
        before = strange.spent()
        firsts_s: dict[Path, list[float]] = {known.folder: [], strange.folder: []}
        for number in range(num_images):
            for up in (known, strange) if number % 2 else (strange, known):
                time.sleep(REST_S)
                firsts_s[up.folder].append(ask(up.server.url, question(number)).first_token_s)
        medians_s = {folder: statistics.median(found) for folder, found in firsts_s.items()}
        spent = {name: after - before[name] for name, after in strange.spent().items()}
    return {
        "first_turn": medians_s[strange.folder] / medians_s[known.folder],
        "decodes": spent["decodes"],
        "processor_s": spent["processor_s"],
        "tower_runs": spent["tower_runs"],
    }


def refusals(num_turns: int) -> dict[str, float]:
    """Turns of a conversation that go to two replicas by turns, over the transport that sends each image once."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {"MMCACHE_FILES": folder, "MMCACHE_FILES_UUIDS": "1"}
        with replicas(shared) as (one, other):
            balancer = ByTurns(one.server.url, other.server.url)
            with httpx.Client(transport=cast("Any", OnceTransport(balancer)), timeout=120) as client:
                messages: list[dict[str, Any]] = []
                for turn in range(num_turns):
                    content = [{"type": "text", "text": f"Turn {turn}?"}, image_part(url_of(SMALL, turn % PICTURES))]
                    messages = [*messages[1 - 2 * SHOWN :], {"role": "user", "content": content}]
                    asked = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
                    client.post(f"{one.server.url}{PATH}", json=asked).raise_for_status()
                    messages.append({"role": "assistant", "content": f"Answer {turn}."})
    whole = sum(len(url_of(SMALL, turn % PICTURES)) * min(turn + 1, SHOWN) for turn in range(num_turns))
    refused = sum(status != 200 for status in balancer.statuses)
    return {"turns": num_turns, "refused": refused, "sent_by_whole": balancer.sent_bytes / whole}


class ByTurns(httpx.HTTPTransport):
    """Sends each request to the next of these addresses, as a balancer does that knows nothing."""

    def __init__(self, *urls: str) -> None:
        super().__init__()
        self._next = itertools.cycle(httpx.URL(url) for url in urls)
        self.statuses: list[int] = []
        self.sent_bytes = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        target = next(self._next)
        request.url = request.url.copy_with(host=target.host, port=target.port)
        self.sent_bytes += len(request.content)
        response = super().handle_request(request)
        self.statuses.append(response.status_code)
        return response


@contextlib.contextmanager
def replicas(env: dict[str, str]) -> Iterator[tuple[Probed, Probed]]:
    """Two servers of one model with these settings. The model has one path: what images are called depends on it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        model, more = build_cached("qwen3-vl", Path(folder)), {"XDG_CACHE_HOME": folder, **env}
        logs = (Path(folder) / f"{number}.log" for number in range(2))
        one, other = (running.enter_context(probed_server(model, "mmcache", SHOWN, ARGS, more, log)) for log in logs)
        yield one, other


def question(number: int) -> Body:
    """A question about an image, with words before it that no other question has."""
    content = [{"type": "text", "text": f"Question {next(_numbers)} about this:"}, image_part(url_of(SCREEN, number))]
    return [json.dumps(request([{"role": "user", "content": content}])).encode()]
