# SPDX-License-Identifier: Apache-2.0
"""Scenarios on real servers as data, and what carries them out: servers, who asks what in which order, what is counted.

Everything is counted alike on stock and plugin (probing.py). A client is a generator: it gives the body of a request,
and gets the reply. Several are several threads, each of which asks when its last request is answered.
"""

import contextlib
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from math import inf
from statistics import median
from typing import NamedTuple

from mmcache_tools.zoo import ZooOptions, build_cached

from benchmarks.pictures import SMALL, Kind, url_of
from benchmarks.probing import Probed, for_each, probed_server
from benchmarks.processes import server_memory
from benchmarks.results import ROOT, SIDES, Result
from benchmarks.servers import Body, Reply, ask, counters, image_part, stored, talk

ARTIFACTS = ROOT / ".artifacts" / "scenarios"  # on disk: /tmp may be RAM
SETTLED_S, SETTLE_TIMEOUT_S = 2.0, 30.0

Client = Generator[Body, Reply, None]
Talk = Callable[[], Body]
Counted = Iterator[tuple[tuple[str, str], float]]  # by case and what is counted

_numbers = count(1)


@dataclass
class Seen:
    """What was seen of a case on one side, in all of its steps together."""

    replies: list[Reply] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # of questions, or of whole steps
    seconds: float = 0.0  # of all steps
    body_bytes: int = 0
    spent: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)  # moments, with bytes by process
    prefix_cache_hits: float = 0.0  # by vLLM's counter, where somebody else asked


Drive = Callable[[Probed, Seen], None]


class Step(NamedTuple):
    """What is done to a server; counted under `case` where it has one."""

    case: str
    drive: Drive
    is_whole: bool = False  # its time is that of the step, not of a question


class Life(NamedTuple):
    """A server from its start to its end, and what is done meanwhile."""

    steps: Iterable[Step]
    args: Sequence[str] = ()
    env: Mapping[str, str] = {}
    images: int = 1  # in a prompt


def for_a_question(options: Namespace, seen: Mapping[str, Seen]) -> Counted:
    """Medians of times, and the rest for one question."""
    for case, one in seen.items():
        number = len(one.replies)
        numbers = {"questions": number, "time_s": median(one.times_s), **for_each(one.spent, number)}
        numbers |= {"first_token_s": median(reply.first_token_s for reply in one.replies)}
        numbers |= {"turns_per_s": number / one.seconds, "body_bytes": one.body_bytes / number}
        numbers |= {"encoded_bytes": numbers["body_bytes"] * 3 / 4}  # base64; all else of a body is some hundred bytes
        if one.replies[0].prompt_tokens:  # they were asked for
            numbers["prompt_tokens"] = sum(reply.prompt_tokens for reply in one.replies) / number
            numbers["cached_tokens"] = sum(reply.cached_tokens for reply in one.replies) / number
        yield from (((case, what), value) for what, value in numbers.items())


@dataclass(frozen=True)
class Scenario:
    """`lives`: the servers of a side, one after the other, by the options, the side and the setting of an empty store.

    `is_together`: the servers of all sides are up at once, and are asked in turn. `is_same`: answers must be.
    """

    lives: Callable[[Namespace, str, str], Iterable[Life]]
    numbers: Callable[[Namespace, Mapping[str, Seen]], Counted] = for_a_question
    max_pixels: int = ZooOptions().max_pixels
    tier: str = "disk"
    is_together: bool = False
    is_same: bool = False


def measure(scenario: Scenario, options: Namespace, sides: Sequence[str] = (), result: Result | None = None) -> Result:
    """Carry it out on sides, those of the options if none are named. A request that failed is a problem."""
    result, sides = result or Result(), sides or getattr(options, "sides", SIDES)
    seen = carry_out(scenario, options, sides)
    for side, cases in seen.items():
        for case, one in cases.items():
            if one.failures:
                result.problems.append(f"{case}: {len(one.failures)} requests failed on {side}: {one.failures[0]}")
    answers = [[[token for token, _ in reply.answer] for one in cases.values() for reply in one.replies]
               for cases in seen.values()]  # fmt: skip
    if scenario.is_same and any(one != answers[0] for one in answers):
        result.problems.append("the answers differ")
    result.add_sides({side: dict(scenario.numbers(options, cases)) for side, cases in seen.items()})
    return result


def carry_out(scenario: Scenario, options: Namespace, sides: Sequence[str]) -> dict[str, dict[str, Seen]]:
    """What was seen, by side and case. Each server has answered a question about an image of no step."""
    zoo, seen = ZooOptions(max_pixels=scenario.max_pixels), {side: defaultdict[str, Seen](Seen) for side in sides}
    model = build_cached(getattr(options, "family", "qwen3-vl"), ARTIFACTS, options=zoo)
    for group in [tuple(sides)] if scenario.is_together else [(side,) for side in sides]:
        with stored(scenario.tier, below=ARTIFACTS) as store:
            for lives in zip(*(scenario.lives(options, side, store) for side in group), strict=True):
                with contextlib.ExitStack() as stack:
                    up = {side: stack.enter_context(probed_server(model, side, life.images, life.args, life.env))
                          for side, life in zip(group, lives, strict=True)}  # fmt: skip
                    for one in up.values():
                        ask(one.server.url, new(SMALL)())
                    for number, steps in enumerate(zip(*(life.steps for life in lives), strict=True)):
                        for side, step in list(zip(group, steps, strict=True))[:: -1 if number % 2 else 1]:
                            do(step, up[side], seen[side][step.case])
    return {side: {case: one for case, one in cases.items() if case} for side, cases in seen.items()}


def do(step: Step, up: Probed, seen: Seen) -> None:
    """One step, and what it cost."""
    answered, before, start = len(seen.replies), up.spent(), time.perf_counter()
    step.drive(up, seen)
    seconds = time.perf_counter() - start
    seen.spent.update(up.spent())
    seen.spent.subtract(before)
    seen.seconds += seconds
    seen.times_s += [seconds] if step.is_whole else [reply.first_token_s for reply in seen.replies[answered:]]


def asks(*clients: Client, seconds: float = inf, ask: Callable[[str, Body], Reply] = ask) -> Drive:
    """Clients at once, which end with their questions, or after `seconds`; after the first one's memory is looked at.

    A request that failed is thrown into its client. Who does not catch it ends the benchmark.
    """

    def drive(up: Probed, seen: Seen) -> None:
        deadline = time.monotonic() + seconds

        def converse(client: Client) -> None:
            with contextlib.suppress(StopIteration):
                body = next(client)
                while time.monotonic() < deadline:
                    try:
                        reply = ask(up.server.url, body)
                    except Exception as error:  # whatever it is: the others go on
                        seen.failures.append(f"{type(error).__name__}: {error}"[:500])
                        body = client.throw(error)
                    else:
                        seen.replies.append(reply)
                        seen.body_bytes += sum(map(len, body))
                        if client is clients[0]:
                            seen.memory.append((time.monotonic(), server_memory(up.server)))
                        body = client.send(reply)

        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(converse, clients))

    return drive


def questions(talks: Iterable[Talk]) -> Client:
    """A client that asks about each, one after the other."""
    for one in talks:
        yield one()


def each(talks: Iterable[Talk]) -> Drive:
    return asks(questions(talks))


def new(kind: Kind) -> Talk:
    """About a picture that no server was asked about."""
    return talk(image_part(url_of(kind, next(_numbers))))


def settle(up: Probed, seen: Seen) -> None:
    """Wait until the plugin has stored as much as it will: its counters come with the next question."""
    deadline, before, saved = time.monotonic() + SETTLE_TIMEOUT_S, -1.0, -2.0
    while saved != before and time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        ask(up.server.url, talk({"type": "text", "text": "Nothing to look at."})())
        before, saved = saved, counters(up.server.url)["features_saved"]
