# SPDX-License-Identifier: Apache-2.0
"""A warm turn about 20 images: the same images and a new question; all images and their tokens are cached.

Real servers, one after the other. The floor is the same turn with ids only (on stock vLLM), plus the time a bare ASGI
app under the same uvicorn takes to receive the same bytes. Eight conversations at once hold the same images, so that
the server's caches need not be larger than for one.
"""

import contextlib
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import httpx

from benchmarks.pictures import JPEG, PNG, SMALL, Kind, data_url, picture, variant
from benchmarks.processes import MIB, process_cpu_s
from benchmarks.results import Result
from benchmarks.servers import (
    PATH,
    TIMEOUT_S,
    Talk,
    counters,
    first_token_s,
    image_part,
    memory,
    on_each_side,
    question,
    talk,
)
from vllm_mmcache.client import OnceTransport
from vllm_mmcache.demo.server import Server, free_port
from vllm_mmcache.zoo import ZooOptions

CASES = {"PNG": PNG, "JPEG": JPEG}
NUM_WARM_UPS = 2
NUM_MEMORY_STEPS = 4
START_TIMEOUT_S = 30
MAX_PIXELS = 768 * 768  # 576 tokens an image, so that 20 of them fit into the 16,384 positions of the model
ARGS, ENV = ("--max-model-len", "16384"), {"VLLM_CPU_KVCACHE_SPACE": "2"}


def measure(options: Namespace) -> Result:
    """Both sides; times are medians."""
    result = Result()
    files = {case: [picture(kind, number) for number in range(options.images)] for case, kind in CASES.items()}
    with bare_server() as url:
        bare = {case: median(turns(url, about(CASES[case], files[case]), options.turns)) for case in CASES}

    def one_side(server: Server, side: str) -> Iterator[tuple[tuple[str, str], float]]:
        return measured(server, files, options, bare, result.details.setdefault(side, {}))

    zoo = ZooOptions(max_pixels=MAX_PIXELS)
    on_each_side(result, one_side, zoo=zoo, images=options.images, args=ARGS, env=ENV)
    return result


def measured(
    server: Server, files: dict[str, list[bytes]], options: Namespace, bare: dict[str, float], details: dict[str, Any]
) -> Iterator[tuple[tuple[str, str], float]]:
    """All cases on one server, each number as soon as it is there."""
    seen = memory(server, SMALL, options.images, options.distinct, NUM_MEMORY_STEPS)
    details["memory_mib"] = [(images, round(found["api_server"] / MIB, 1)) for images, found in seen]
    for case, kind in CASES.items():
        conversation = about(kind, files[case])
        first_token_s(server.url, conversation.body(question()))  # cold
        turns(server.url, conversation, 0)
        counted, cpu_s = counters(server.url), process_cpu_s(server.process.pid)
        seconds = [first_token_s(server.url, conversation.body(question())) for _ in range(options.turns)]
        cpu_s = process_cpu_s(server.process.pid) - cpu_s
        spent = {name: (value - counted[name]) / options.turns for name, value in counters(server.url).items()}
        details[case] = {"times_s": seconds, "counters_per_turn": spent}
        yield (case, "body_bytes"), len(conversation.head) + len(conversation.tail)
        yield (case, "first_token_s"), median(seconds)
        yield (case, "api_server_cpu_s"), cpu_s / options.turns
        yield (case, "decodes"), spent.get("images_decoded", options.images)  # stock decodes them all, each turn
        ids = median(ids_turns(server.url, case, about_urls(kind, files[case]), options.turns))
        yield (case, "ids_s"), ids
        yield (case, "ids_and_bare_receive_s"), ids + bare[case]
    yield ("conversations at once", "turns_per_s"), at_once(server, files["PNG"], options)
    yield ("PNG, client transport", "first_token_s"), median(transport_turns(server, files["PNG"], options.turns))
    yield ("unknown images", "first_token_s"), median(cold_turns(server, PNG, files["PNG"], options.cold))


def about_urls(kind: Kind, files: list[bytes]) -> list[str]:
    return [data_url(kind, content) for content in files]


def about(kind: Kind, files: list[bytes]) -> Talk:
    return talk([image_part(url) for url in about_urls(kind, files)])


def turns(url: str, conversation: Talk, number: int) -> list[float]:
    """Seconds of each of so many turns, after some that are not counted."""
    return [first_token_s(url, conversation.body(question())) for _ in range(NUM_WARM_UPS + number)][NUM_WARM_UPS:]


def ids_turns(url: str, case: str, urls: list[str], number: int) -> list[float]:
    """The same turns with the images named by ids of ours, without their bytes."""
    ids = [f"benchmark-{case}-{one}" for one in range(len(urls))]
    known = talk([image_part(one, uuid) for one, uuid in zip(urls, ids, strict=True)])
    first_token_s(url, known.body(question()))
    return turns(url, talk([image_part(None, uuid) for uuid in ids]), number)


def at_once(server: Server, files: list[bytes], options: Namespace) -> float:
    """Warm turns per second of several clients that each send the next turn when the last is answered."""
    conversation, number = about(PNG, files), options.conversations * options.turns_at_once
    with ThreadPoolExecutor(options.conversations) as pool:
        list(pool.map(lambda _: first_token_s(server.url, conversation.body(question())), range(options.conversations)))
        start = time.perf_counter()
        list(pool.map(lambda _: first_token_s(server.url, conversation.body(question())), range(number)))
        return number / (time.perf_counter() - start)


def transport_turns(server: Server, files: list[bytes], number: int) -> list[float]:
    """The same turns through the client's transport, which gets the serialised request with all bytes."""
    conversation, seconds = about(PNG, files), []
    with httpx.Client(timeout=TIMEOUT_S) as client, OnceTransport(httpx.HTTPTransport()) as transport:
        for _ in range(1 + NUM_WARM_UPS + number):  # the first one carries the bytes
            body, headers = b"".join(conversation.body(question())), {"content-type": "application/json"}
            request = client.build_request("POST", server.url + PATH, content=body, headers=headers)
            start = time.perf_counter()
            answer = transport.handle_request(request)
            line = next(answer.iter_lines())
            seconds.append(time.perf_counter() - start)
            answer.close()
            if answer.status_code != 200 or not line.startswith("data:") or '"error"' in line:
                raise RuntimeError(f"{server.url} answered {answer.status_code}: {line[:500]}")
    return seconds[1 + NUM_WARM_UPS :]


def cold_turns(server: Server, kind: Kind, files: list[bytes], number: int) -> list[float]:
    """First turns about images that the server has never seen."""
    seconds = []
    for sample in range(number):
        unknown = [variant(kind, content, f"cold {sample} {one}") for one, content in enumerate(files)]
        seconds.append(first_token_s(server.url, about(kind, unknown).body(question())))
    return seconds


@contextlib.contextmanager
def bare_server() -> Iterator[str]:
    """The bare app under uvicorn, with the event loop and HTTP parser that vLLM's server has."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.warm_turn:bare", "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "error", "--lifespan", "off"])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                first_token_s(url, [b"{}"])
                break
            except ConnectionError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


async def bare(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """The least that a server can do with a body: an ASGI app that receives it whole, and answers with one line."""
    pieces, more = [], True
    while more:
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    b"".join(pieces)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": b"data:\n"})
