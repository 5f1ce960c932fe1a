# SPDX-License-Identifier: Apache-2.0
"""Two replicas behind a router of PyPI: where second questions about an image go, and what becomes of a killed replica.

Needs `pip install '.[fleet]'`. A client asks about each image twice, all images once before any of them again. What a
router does without the header of the client transport (side `without`) and with it (side `header`) is counted on the
replicas: requests, and images that the vision tower ran for.

Dynamo's selection service is asked, too, at which of two replicas it finds the blocks of a prompt with a picture, from
the KV events that the replicas publish.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sysconfig
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from mmcache_tools.harness.server import Server, failure, free_port, started
from mmcache_tools.zoo import build_cached
from openai import OpenAI, OpenAIError

from benchmarks import dynamo
from benchmarks.pictures import SMALL, url_of
from benchmarks.results import Result
from benchmarks.servers import MODEL, counters, zoo_server
from vllm_mmcache.client import http_client
from vllm_mmcache.client.affinity import HEADER

BLOCK_TOKENS = 32  # as the benchmarks' servers have it
ROUTER_START_S = 60.0
SUBSCRIBED_S = 2.0  # until a subscriber hears a publisher, and what it has heard is in the service's index
WORDS = "Look at the whole picture before you answer. " * 8
ROUTERS: dict[str, tuple[str, ...]] = {
    "vllm-router, consistent hashing": (
        "vllm-router", "--policy", "consistent_hash", "--cb-failure-threshold", "2",
        "--cb-timeout-duration-secs", "600",
    ),
    "smg, consistent hashing": (
        "smg", "launch", "--policy", "consistent_hashing", "--routing-key-headers", HEADER,
        "--cb-failure-threshold", "2",
    ),
    "vllm-router, round robin": ("vllm-router", "--policy", "round_robin"),
}  # fmt: skip
SIDES = {"without": None, "header": HEADER}


@dataclass
class Asked:
    """What a client has asked and been answered: image and question -> text. `failed`: errors, in words."""

    answers: dict[tuple[int, int], str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def measure(options: Namespace) -> Result:
    """By router and side: second questions on the replica of the first, the busier replica's share, tower runs."""
    result, next_image = Result(), 0
    with tempfile.TemporaryDirectory() as folder, replicas(Path(folder)) as servers:
        for name in options.routers:
            with router(ROUTERS[name], servers, Path(folder) / "router.log") as url:
                found: dict[str, dict[tuple[str, str], float]] = {}
                for side, header in SIDES.items():
                    images = range(next_image, next_image + options.images)  # no replica has seen them
                    next_image += options.images
                    numbers = counted(url, servers, header, images)
                    found[side] = {(name, what): number for what, number in numbers.items()}
                result.add_sides(found)
        if options.killed:
            name = options.routers[0]
            with router(ROUTERS[name], servers, Path(folder) / "router.log") as url:
                numbers, problems = killed(url, servers, options.images)
            for what, number in numbers.items():
                result.add(f"{name}, a replica killed", what, {"mmcache": number})
            result.problems += problems
    if options.events:
        with tempfile.TemporaryDirectory() as folder:
            for what, number in found_by_dynamo(Path(folder)).items():
                result.add("Dynamo's selection service", what, {"mmcache": number})
    return result


def counted(url: str, servers: Sequence[Server], header: str | None, images: Sequence[int]) -> dict[str, float]:
    """What the replicas counted while all these images were asked about twice."""
    before = [totals(server) for server in servers]
    client = client_of(url, header)
    asked, same = Asked(), 0
    first: dict[int, int] = {}
    for question in range(2):
        order = random.Random(question).sample(list(images), len(images))  # or taking turns would meet by itself
        for image in order:
            started = [totals(server)["requests"] for server in servers]
            ask(client, asked, image, question)
            ended = [totals(server)["requests"] for server in servers]
            replica = max(range(len(servers)), key=lambda number: ended[number] - started[number])
            same += first.setdefault(image, replica) == replica and question > 0
    grown = [
        {name: after - was[name] for name, after in totals(server).items()}
        for server, was in zip(servers, before, strict=True)
    ]
    return {
        "same_replica": same,
        "second_questions": len(images),
        "busier_share": max(one["requests"] for one in grown) / sum(one["requests"] for one in grown),
        "tower_runs_per_image": sum(one["tower"] for one in grown) / len(images),
        "failed": len(asked.failed),
    }


def killed(url: str, servers: Sequence[Server], num_images: int) -> tuple[dict[str, float], list[str]]:
    """Four clients stream answers while the second replica is killed; what failed then and after it."""
    client = client_of(url, HEADER)
    right, asked = Asked(), Asked()
    for image in range(num_images):
        ask(client, right, image, 0)
    lock, began = threading.Lock(), time.monotonic()
    failures: list[float] = []
    at: list[float] = []

    def one(number: int) -> None:
        mine = Asked()
        if number == 2 * num_images:
            os.killpg(servers[1].process.pid, signal.SIGKILL)
            at.append(time.monotonic() - began)
        start = time.monotonic() - began
        ask(client, mine, number % num_images, 0, is_streamed=number % 2 == 0)
        with lock:
            asked.failed += mine.failed
            failures.extend([start] * len(mine.failed))
            wrong.extend(key for key, text in mine.answers.items() if text != right.answers[key])

    wrong: list[tuple[int, int]] = []
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(5 * num_images)))
    later = sum(start > at[0] for start in failures)
    problems = [f"{len(wrong)} answers were wrong: {wrong[:3]}"] if wrong else []
    if later > 1:  # the next request is what the router finds out by, with retries off
        problems.append(f"{later} requests failed that began after the replica was killed: {asked.failed[-1]}")
    found = {"requests": 5.0 * num_images, "failed": len(failures), "failed_later": later, "wrong": len(wrong)}
    return found, problems


def found_by_dynamo(folder: Path) -> dict[str, float]:
    """Of the blocks of a prompt with a picture, those that Dynamo finds at its replica, and at the one of another.

    The pictures have the same size, and the questions the same words. Of two pictures, `blocks` of both prompts and
    those `found` at the holder; shares of a prompt's blocks, the least and the greatest; `chosen` are pictures whose
    replica Dynamo would send the next question to.
    """
    ports = [free_port(), free_port()]
    events = [
        json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv"})
        for port in ports
    ]
    args = [("--kv-events-config", config) for config in events]
    with (
        replicas(folder, MMCACHE_KV_EVENT_IDS="dynamo", more_args=args) as servers,
        dynamo.selection(folder / "dynamo.log") as service,
    ):
        for number, port in enumerate(ports):
            dynamo.add_replica(service, number, port, BLOCK_TOKENS)
        time.sleep(SUBSCRIBED_S)
        (config,) = (folder / "replica 0").glob("*/config.json")
        image_token = json.loads(config.read_text())["image_token_id"]
        num_blocks, num_found, num_chosen, elsewhere = [], [], 0, []
        for holder, server in enumerate(servers):
            digest = 0x1234567890ABCDEF + holder
            tokens = ask_named(server.url, holder, dynamo.uuid_of(digest))
            time.sleep(SUBSCRIBED_S)
            prompt = dynamo.prompt_of(tokens, BLOCK_TOKENS, image_token, digest)
            known = dynamo.overlaps(service, prompt)
            num_blocks.append(len(prompt["block_hashes"]))
            num_found.append(known[holder])
            elsewhere.append(known[1 - holder] / num_blocks[-1])
            num_chosen += dynamo.chosen(service, prompt) == holder
    return {
        "blocks": sum(num_blocks),
        "found": sum(num_found),
        "at_holder": min(found / blocks for found, blocks in zip(num_found, num_blocks, strict=True)),
        "elsewhere": max(elsewhere),
        "chosen": num_chosen,
    }


def ask_named(url: str, image: int, uuid: str) -> list[int]:
    """Ask about an image that has this uuid, as Dynamo's worker would. Returns the prompt's tokens."""
    words = {"type": "text", "text": WORDS}
    picture = {"type": "image_url", "image_url": {"url": url_of(SMALL, image)}, "uuid": uuid}
    messages = [{"role": "user", "content": [words, picture, {"type": "text", "text": "What is it?"}]}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    return list(dynamo.post(f"{url}/v1/chat/completions", asked)["prompt_token_ids"])


def ask(client: OpenAI, asked: Asked, image: int, question: int, is_streamed: bool = False) -> None:
    """Ask a question about an image, and note the answer."""
    parts: list[Any] = [
        {"type": "text", "text": f"Picture {image}. {WORDS}"},
        {"type": "image_url", "image_url": {"url": url_of(SMALL, image)}},
        {"type": "text", "text": ("What is it?", "Which colours does it have?")[question]},
    ]
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    try:
        said: Any = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0, **more
        )
        if is_streamed:
            events = list(said)
            text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
            if events[-1].usage is None:
                raise OpenAIError("the stream was cut")
        else:
            text = said.choices[0].message.content or ""
    except (OpenAIError, httpx.HTTPError) as error:
        asked.failed.append(repr(error)[:300])
    else:
        asked.answers[image, question] = text


def client_of(url: str, header: str | None) -> OpenAI:
    """A client over the transport that sends each image once, with or without the header."""
    return OpenAI(base_url=f"{url}/v1", api_key="of-the-fleet", max_retries=0, http_client=http_client(affinity=header))


@contextlib.contextmanager
def replicas(folder: Path, more_args: Sequence[Sequence[str]] = ((), ()), **env: str) -> Iterator[list[Server]]:
    """Servers of the same model with the plugin, started one after the other, each with its own further arguments."""
    with contextlib.ExitStack() as running:
        servers = []
        for replica, own in enumerate(more_args):
            model = build_cached("qwen3-vl", folder / f"replica {replica}")
            args = ("--enable-prefix-caching", "--max-model-len", "2048", *own)
            more = {"VLLM_SERVER_DEV_MODE": "1", **env}
            servers.append(running.enter_context(zoo_server(model, "mmcache", images=4, args=args, env=more)))
        yield servers


@contextlib.contextmanager
def router(command: Sequence[str], servers: Sequence[Server], log: Path) -> Iterator[str]:
    """The address of a router before the servers.

    Raises: RuntimeError where it is not installed; EnvironmentProblem where it does not start or finds no replica.
    """
    program = shutil.which(command[0], path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise RuntimeError(f"no {command[0]}: pip install '.[fleet]'")
    port, metrics = free_port(), free_port()
    arguments = [program, *command[1:], "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    arguments += ["--worker-urls", *(server.url for server in servers)]
    with started(arguments, port, log_path=log, timeout_s=ROUTER_START_S) as server:
        deadline = time.monotonic() + ROUTER_START_S
        while not is_routing(server.url):
            if time.monotonic() > deadline:
                raise failure(server, f"{command[0]} has found no replica")
            time.sleep(0.25)
        yield server.url


def is_routing(url: str) -> bool:
    """Whether the router has found a replica."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models", timeout=10).status_code == 200
    return False


def totals(server: Server) -> dict[str, float]:
    """What a replica has counted: requests that were answered, and images that its vision tower ran for."""
    return {
        "requests": counters(server.url, "vllm")["request_success"],
        "tower": counters(server.url)["tower_images"],
    }
