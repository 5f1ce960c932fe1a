# SPDX-License-Identifier: Apache-2.0
"""Many conversations at once for minutes: failures, requests per second, times, and memory over time.

Real servers, one after the other, on the cores that the clients use, too. A fifth of the time is warm-up, and not
measured. The caches that may fill for hours are made small, on both sides alike, so that they are full after it.

Each client has one conversation at a time, which grows, with screenshots, and sends the next turn when the last is
answered. At its last turn a new one with other screenshots begins. First conversations are of different lengths, so
that at any time the conversations are of all ages, and the load is the same from beginning to end.
"""

import itertools
import json
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import quantiles
from typing import Any

from benchmarks.pictures import SCREEN, data_url, picture, variant
from benchmarks.processes import MemoryWatch
from benchmarks.results import Result
from benchmarks.servers import SMALL_ARGS, SMALL_CACHES, Reply, ask, on_each_side, request
from vllm_mmcache.demo.server import Server
from vllm_mmcache.zoo import ZooOptions

MAX_PIXELS = 512 * 512  # 256 tokens a screenshot, so that 16 conversations are more than two cores can't serve
WARM_UP = 0.2  # of the time
SETTLED_S = 120  # of load, before a growth of memory says anything: caches fill first
NUM_ERRORS = 5  # kept in the result
NUM_SCREENS = 4  # drawn; every one that is sent is a variant of one of them
TURNS = 12  # of a conversation
IMAGES = TURNS // 2  # a screenshot comes with every other turn
ANSWER_TOKENS = 16
RULES = "You look at screenshots and say what to do next. " * 12
QUESTION = "This is step {} of task {}. What has changed, and what should be done next? " + "Be brief. " * 6
MORE = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True}}
PAUSE_S = 1.0  # after a failure


def measure(options: Namespace) -> Result:
    """Both sides; a request that failed is a problem."""
    result = Result()

    def one_side(server: Server, side: str) -> dict[tuple[str, str], float]:
        load, warm_up_s = Load(server.url, options.conversations), WARM_UP * options.seconds
        with MemoryWatch(server) as watch:
            load.run(options.seconds)
        growth = watch.growth(warm_up_s)
        result.details[side] = {"errors": sorted(set(load.failures))[:NUM_ERRORS], "memory": growth}
        if load.failures:
            result.problems.append(f"{len(load.failures)} requests failed on {side}: {load.failures[0]}")
        return numbers(load, growth, warm_up_s)

    args = (*SMALL_ARGS, "--dtype", "bfloat16" if options.family == "qwen3.5" else "float32")
    zoo = ZooOptions(max_pixels=MAX_PIXELS)
    on_each_side(result, one_side, options.sides, options.family, zoo, images=IMAGES, args=args, env=SMALL_CACHES)
    return result


def numbers(load: "Load", growth: dict[str, dict[str, Any]], warm_up_s: float) -> dict[tuple[str, str], float]:
    """One side's, by case and what is counted. Raises: RuntimeError where there are too few requests to measure."""
    measured = [(start_s, reply) for start_s, reply in load.asked if start_s >= warm_up_s]
    if len(measured) < 2:
        raise RuntimeError(f"{len(measured)} requests after a warm-up of {warm_up_s} s; failures: {load.failures[:3]}")
    end_s = max(start_s + reply.whole_s for start_s, reply in measured)
    found: dict[tuple[str, str], float] = {
        ("load", "requests_per_s"): len(measured) / (end_s - warm_up_s), ("load", "failed"): len(load.failures),
        ("load", "requests"): len(load.asked), ("load", "requests_measured"): len(measured),
        ("load", "images"): load.num_images,
        ("load", "prompt_tokens"): sum(reply.prompt_tokens for _, reply in measured),
        ("load", "cached_tokens"): sum(reply.cached_tokens for _, reply in measured),
    }  # fmt: skip
    for what in ("first_token_s", "whole_s"):
        hundredths = quantiles([getattr(reply, what) for _, reply in measured], n=100, method="inclusive")
        found |= {("p50", what): hundredths[49], ("p99", what): hundredths[98]}
    for process, sizes in growth.items():
        kept = {name: value for name, value in sizes.items() if isinstance(value, float)}
        if load.seconds < SETTLED_S:
            kept.pop("slope_mib_per_minute", None)
        found |= {(process, name): value for name, value in kept.items()}
    return found


class Load:
    """So many clients at once against one server, until the time is over."""

    def __init__(self, url: str, conversations: int) -> None:
        self.url = url
        self.conversations = conversations
        self.seconds = 0.0
        self.asked: list[tuple[float, Reply]] = []  # each with its start, in seconds since the load's
        self.failures: list[str] = []
        self.num_images = 0  # unlike all others
        self._screens = [picture(SCREEN, number) for number in range(NUM_SCREENS)]
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def run(self, seconds: float) -> None:
        """Ends when the requests that were under way after `seconds` are answered."""
        self.seconds = seconds
        self._start = time.monotonic()
        self._deadline = self._start + seconds
        with ThreadPoolExecutor(self.conversations) as pool:
            for done in [pool.submit(self._client, number) for number in range(self.conversations)]:
                done.result()

    def _client(self, number: int) -> None:
        turns = 1 + number * TURNS // self.conversations
        while time.monotonic() < self._deadline:
            self._converse(turns)
            turns = TURNS

    def _converse(self, turns: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": RULES}]
        for content in itertools.islice(self._user_turns(), turns):
            if time.monotonic() >= self._deadline:
                return
            messages.append({"role": "user", "content": content})
            start_s = time.monotonic() - self._start
            try:
                reply = ask(self.url, [json.dumps(request(messages, **MORE)).encode()])
                if reply.answer_tokens != ANSWER_TOKENS:
                    raise RuntimeError(f"an answer of {reply.answer_tokens} tokens instead of {ANSWER_TOKENS}")
            except Exception as error:  # whatever it is: the request failed, the others go on
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}"[:500])
                time.sleep(PAUSE_S)
                return
            messages.append({"role": "assistant", "content": reply.text})
            with self._lock:
                self.asked.append((start_s, reply))

    def _user_turns(self) -> Iterator[list[dict[str, Any]]]:
        """What the user says, turn by turn, for ever."""
        task = next(self._numbers)
        for turn in itertools.count():
            content: list[dict[str, Any]] = []
            if turn % 2 == 0:
                screen = variant(SCREEN, self._screens[(task + turn) % NUM_SCREENS], f"{task} {turn}")
                content.append({"type": "image_url", "image_url": {"url": data_url(SCREEN, screen)}})
                with self._lock:
                    self.num_images += 1
            yield [*content, {"type": "text", "text": QUESTION.format(turn, task)}]
