# SPDX-License-Identifier: Apache-2.0
"""Everything that is measured on one running server, the same for stock and plugin.

A turn is the same images and a new question: all images and their tokens are cached, the question is not. Eight
conversations at once hold the same images, so that the server's caches need not be larger than for one.
"""

import concurrent.futures
import itertools
import re
import time
import urllib.request
from argparse import Namespace
from typing import Any

import httpx

from benchmarks.processes import process_cpu_s, server_memory
from benchmarks.warm_turn.pictures import JPEG, PNG, SMALL, Kind, data_url, picture, variant
from benchmarks.warm_turn.turns import (
    PATH,
    TIMEOUT_S,
    Talk,
    first_token_s,
    image_part,
    talk,
)
from vllm_mmcache.client import OnceTransport
from vllm_mmcache.demo.server import Server

CASES = {"png": PNG, "jpeg": JPEG}
NUM_WARM_UPS = 2
NUM_MEMORY_STEPS = 4

_numbers = itertools.count()


def question() -> str:
    """Never the same twice."""
    return f"Question {next(_numbers)}: what is different now?"


def make_pictures(options: Namespace) -> dict[str, list[bytes]]:
    """The image files of each case, for both sides."""
    return {name: [picture(kind, number) for number in range(options.images)] for name, kind in CASES.items()}


def measure(server: Server, files: dict[str, list[bytes]], options: Namespace) -> dict[str, Any]:
    """All cases on one server. Units: seconds, of which those of turns are lists, one number per turn."""
    seen = memory(server, SMALL, options.images, options.distinct, NUM_MEMORY_STEPS)
    result: dict[str, Any] = {"memory": seen}  # first: later the allocator has room to reuse
    for name, kind in CASES.items():
        urls = [data_url(kind, content) for content in files[name]]
        result[name] = warm_turns(server, talk([image_part(url) for url in urls]), options.turns)
        result[name]["ids_s"] = ids_turns(server, name, urls, options.turns)
    result["at_once"] = turns_at_once(server, files["png"], options)
    result["transport_s"] = transport_turns(server, PNG, files["png"], options.turns)
    result["cold_s"] = cold_turns(server, PNG, files["png"], options.cold)
    return result


def warm_turns(server: Server, conversation: Talk, num_turns: int) -> dict[str, Any]:
    """Turns of one conversation, one after the other."""
    for _ in range(1 + NUM_WARM_UPS):  # the first one is cold
        first_token_s(server.url, conversation.body(question()))
    counted, cpu_s = counters(server.url), process_cpu_s(server.process.pid)
    seconds = [first_token_s(server.url, conversation.body(question())) for _ in range(num_turns)]
    cpu_s = process_cpu_s(server.process.pid) - cpu_s
    per_turn = {name: (value - counted[name]) / num_turns for name, value in counters(server.url).items()}
    return {
        "body_bytes": len(conversation.head) + len(conversation.tail),
        "warm_s": seconds,
        "api_server_cpu_s": cpu_s / num_turns,
        "counters_per_turn": per_turn,
        "images_decoded": per_turn.get("images_decoded"),
    }


def ids_turns(server: Server, name: str, urls: list[str], num_turns: int) -> list[float]:
    """The same turns with the images named by ids of ours, without their bytes."""
    ids = [f"benchmark-{name}-{number}" for number in range(len(urls))]
    known = talk([image_part(url, uuid) for url, uuid in zip(urls, ids, strict=True)])
    short = talk([image_part(None, uuid) for uuid in ids])
    first_token_s(server.url, known.body(question()))
    return [first_token_s(server.url, short.body(question())) for _ in range(NUM_WARM_UPS + num_turns)][NUM_WARM_UPS:]


def turns_at_once(server: Server, files: list[bytes], options: Namespace) -> dict[str, float]:
    """Warm turns per second of several clients that each send the next turn when the last is answered."""
    conversation = talk([image_part(data_url(PNG, content)) for content in files])
    num_turns = options.conversations * options.turns_at_once

    def ask(_: int) -> float:
        return first_token_s(server.url, conversation.body(question()))

    with concurrent.futures.ThreadPoolExecutor(options.conversations) as pool:
        list(pool.map(ask, range(options.conversations)))
        start, cpu_s = time.perf_counter(), process_cpu_s(server.process.pid)
        list(pool.map(ask, range(num_turns)))
        seconds = time.perf_counter() - start
    cpu_s = process_cpu_s(server.process.pid) - cpu_s
    return {"turns_per_s": num_turns / seconds, "api_server_cpu_s": cpu_s / num_turns}


def transport_turns(server: Server, kind: Kind, files: list[bytes], num_turns: int) -> list[float]:
    """The same turns through the client's transport, which gets the serialised request with all bytes."""
    conversation = talk([image_part(data_url(kind, content)) for content in files])
    with httpx.Client(timeout=TIMEOUT_S) as client, OnceTransport(httpx.HTTPTransport()) as transport:
        seconds = []
        for _ in range(1 + NUM_WARM_UPS + num_turns):  # the first one carries the bytes
            body = b"".join(conversation.body(question()))
            headers = {"content-type": "application/json"}
            request = client.build_request("POST", server.url + PATH, content=body, headers=headers)
            start = time.perf_counter()
            answer = transport.handle_request(request)
            line = next(answer.iter_lines())
            seconds.append(time.perf_counter() - start)
            answer.close()
            if answer.status_code != 200 or not line.startswith("data:") or '"error"' in line:
                raise RuntimeError(f"{server.url} answered {answer.status_code}: {line[:500]}")
    return seconds[1 + NUM_WARM_UPS :]


def cold_turns(server: Server, kind: Kind, files: list[bytes], num_samples: int) -> list[float]:
    """First turns about images that the server has never seen."""
    seconds = []
    for sample in range(num_samples):
        unknown = [variant(kind, content, f"cold {sample} {number}") for number, content in enumerate(files)]
        body = talk([image_part(data_url(kind, content)) for content in unknown]).body(question())
        seconds.append(first_token_s(server.url, body))
    return seconds


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


def counters(url: str) -> dict[str, float]:
    """mmcache's counters by name, those with several labels added up; none on stock."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r"^mmcache:(\w+)_total(?:{.*})? (\S+)$", text, re.MULTILINE)
    return {name: sum(float(value) for one, value in found if one == name) for name, _ in found}
