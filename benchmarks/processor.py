# SPDX-License-Identifier: Apache-2.0
"""What an image costs before the model sees it: in rotation, after a restart, by size, many at once; videos.

Parts of at most 10 minutes each, most of them one scenario on one side. What a part found lies in OUTPUT, and a part
that is there in the same size is not measured again, unless --again is given: a run that was cut off goes on. Alone on
the machine, or the numbers say nothing.

A picture has fallen out of vLLM's processor cache when others have come since that fill it. One of 1280x720 takes
5.4 MB of it, in bytes, for vLLM normalises the pixels of this model in the worker: 0.25 GiB are 49. The KV cache holds
two, so that no question is answered from it, and the worker's own cache of the tower's outputs holds two, so that known
features come from the plugin's RAM.
"""

import base64
import contextlib
import itertools
import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median, quantiles
from typing import Any

from benchmarks import probing
from benchmarks.machine import provenance
from benchmarks.pictures import SMALL, Kind, data_url, unlike, video
from benchmarks.processes import server_cpu_s
from benchmarks.results import FOLDER, ROOT, Found, Result, committed
from benchmarks.rows import FALLEN_OUT, TARGETS
from benchmarks.servers import Talk, counters, first_token_s, image_part, question, stored, talk
from benchmarks.sides import SIDES
from vllm_mmcache.zoo import ZooOptions, build_cached

OUTPUT = ROOT / ".artifacts" / "processor"
ZOO = OUTPUT / "zoo"  # the same in all runs: features are those of a model by its name
PNG = Kind("image/png", (1280, 720), 2, {"format": "PNG", "compress_level": 1})  # about 0.8 MB, as screenshots are
FORMATS = {"png": PNG, "jpeg": Kind("image/jpeg", (1280, 720), 24, {"format": "JPEG", "quality": 86})}
SIZES = ((640, 480), (1280, 720), (1920, 1080), (2560, 1600), (3840, 2160))  # 0.3 to 8.3 megapixels

HOLDS_ALL = 4.0  # GiB of the processor cache, which is vLLM's own default: 790 pictures
HELD = 4  # pictures that stay in a small one while only they are asked about
HELD_TIMES = 3
BLOCK = 40  # pictures in rotation between two rounds of those that stay
VIDEO_TIMES = 5  # that a video is asked about
SETTLED_S, SETTLE_TIMEOUT_S = 2.0, 30.0
SMALL_KV = ("--max-model-len", "2048", "--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", "70")
LARGE = (
    "--max-model-len", "9216", "--max-num-batched-tokens", "9216", "--num-gpu-blocks-override", "300",
    "--skip-mm-profiling", "--mm-processor-cache-gb", "0.06",  # one of the largest picture
)  # fmt: skip
MANY = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--mm-processor-cache-gb", "2")
VIDEOS = (
    "--limit-mm-per-prompt", json.dumps({"image": 1, "video": 1}),
    "--media-io-kwargs", json.dumps({"video": {"num_frames": -1}}),
)  # fmt: skip

Counted = dict[str, float]
_numbers = itertools.count(1)


def measure(options: Namespace) -> Result:
    """What is missing; a part that failed is a problem, and the others go on.

    The result also has what the committed one has of parts that were not measured here, if it is of the same size.
    """
    result = Result()
    found: Found = {}
    before = committed("processor") if (FOLDER / "processor.json").exists() else {"options": {}}
    if all(before["options"].get(one) == getattr(options, one) for _, uses in PARTS.values() for one in uses):
        found = {case: what for case, what in before["found"].items() if "ratio" not in what}
        result.details = dict(before["details"])
    for name in options.parts or PARTS:
        try:
            part = measured(name, options)
        except Exception as error:  # whatever it is: the other parts go on
            result.problems.append(f"failed: {name}: {type(error).__name__}: {error}")
            continue
        result.details[name] = {said: value for said, value in part.items() if said != "found"}
        for (case, what, side), number in part["found"]:
            found.setdefault(case, {}).setdefault(what, {})[side] = number
    for case, counted in found.items():
        for what, numbers in counted.items():
            result.add(case, what, numbers)
    for target in TARGETS:
        with contextlib.suppress(KeyError):  # not measured
            number, by = (found[case][what][side] for case, what, side in (target.number, target.by))
            result.add(target.text, "ratio", {"mmcache": number / by, "at most": target.limit})
    return result


def measured(name: str, options: Namespace) -> dict[str, Any]:
    """One part, measured now or before: numbers by (case, what, side), and where they are from."""
    path = OUTPUT / f"{name}.json"
    function, uses = PARTS[name]
    sizes = {one: getattr(options, one) for one in uses}
    if path.exists() and not options.again:
        part: dict[str, Any] = json.loads(path.read_text())
        if part["sizes"] == sizes:
            print(f"{name} was measured before", flush=True)
            return part
    start = time.monotonic()
    numbers = [[[case, what, side], number] for (case, side), counted in function(options)
               for what, number in counted.items()]  # fmt: skip
    part = {**provenance(), "sizes": sizes, "seconds": round(time.monotonic() - start), "found": numbers}
    print(f"{name}: {part['seconds']} s", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")  # whole or not at all: a run may be cut off
    beside.write_text(json.dumps(part, indent=1) + "\n")
    beside.replace(path)
    return part


@contextlib.contextmanager
def server(
    side: str, args: Sequence[str], max_pixels: int = ZooOptions().max_pixels, store: str = ""
) -> Iterator[probing.Probed]:
    """A server of the zoo's model that has answered a question about an image of no part."""
    model = build_cached("qwen3-vl", ZOO, options=ZooOptions(max_pixels=max_pixels))
    with probing.probed_server(model, side, args, {"MMCACHE_STORE": store}) as up:
        ask(up, some(SMALL, 1)[0])
        yield up


def some(kind: Kind, number: int) -> list[Talk]:
    """Conversations about new pictures, each about one: none that this process asked about before."""
    return [talk([image_part(data_url(kind, unlike(kind, next(_numbers))))]) for _ in range(number)]


def encoded_bytes(kind: Kind) -> Counted:
    return {"encoded_bytes": len(unlike(kind, next(_numbers)))}


def ask(up: probing.Probed, conversation: Talk) -> float:
    """Seconds to the first token of a new question."""
    return first_token_s(up.server.url, conversation.body(question()))


class Costs:
    """What questions to a server cost, those of several stretches of time together."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._stretches: list[tuple[int, Counted]] = []

    def each(self, up: probing.Probed, conversations: Sequence[Talk]) -> None:
        """One question about each, one after the other."""
        with self.of(up, len(conversations)):
            self.seconds += [ask(up, one) for one in conversations]

    @contextlib.contextmanager
    def of(self, up: probing.Probed, questions: int) -> Iterator[None]:
        counted, before, cpu_s = counters(up.server.url), probing.read(up.folder), server_cpu_s(up.server)
        yield  # what it costs to ask for the counters is no question's
        cpu_now_s, after, counted_now = server_cpu_s(up.server), probing.read(up.folder), counters(up.server.url)
        spent = probing.for_each(before, after, questions)
        spent |= {f"{process}_cpu_s": (cpu_now_s[process] - cpu_s[process]) / questions for process in cpu_s}
        spent |= {f"counter {name}": (value - counted.get(name, 0.0)) / questions for name, value in counted_now.items()
                  if value != counted.get(name, 0.0)}  # fmt: skip
        self._stretches.append((questions, spent))

    def numbers(self) -> Counted:
        """The median time, and the rest for one question."""
        questions = sum(number for number, _ in self._stretches)
        names = {name for _, spent in self._stretches for name in spent}
        means = {name: sum(spent.get(name, 0.0) * number for number, spent in self._stretches) / questions
                 for name in sorted(names)}  # fmt: skip
        return {"questions": questions, **spread(self.seconds), **means}


def spread(seconds: list[float]) -> Counted:
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"time_s": median(seconds), "first_quartile_s": low, "third_quartile_s": high}


def asked(up: probing.Probed, conversations: Sequence[Talk]) -> Counted:
    costs = Costs()
    costs.each(up, conversations)
    return costs.numbers()


Part = Iterator[tuple[tuple[str, str], Counted]]  # of each case and side


def rotation(side: str, holds_all: bool, options: Namespace) -> Part:
    """Pictures in rotation that have all fallen out of the cache when they come again, and a few that stay in it.

    Both in one server, in turn, so that neither drift nor the start tells them apart. In a cache that holds all,
    nothing has fallen out.
    """
    talks, staying, again, held = some(PNG, options.images), some(PNG, HELD), Costs(), Costs()
    cache_gib = HOLDS_ALL if holds_all else options.cache_gib
    with server(side, (*SMALL_KV, "--mm-processor-cache-gb", str(cache_gib))) as up:
        unknown = asked(up, talks)
        asked(up, staying)
        for _ in range(options.rounds - 1):
            for start in range(0, len(talks), BLOCK):
                again.each(up, talks[start : start + BLOCK])
                asked(up, staying)
                held.each(up, staying * HELD_TIMES)
    if holds_all:
        yield ("rotation, unknown, a cache for all", side), unknown
        yield ("rotation, all in the cache", side), again.numbers()
        return
    yield ("rotation, unknown", side), unknown
    yield (FALLEN_OUT, side), again.numbers() | encoded_bytes(PNG)
    yield ("rotation, held", side), held.numbers()


def restart(side: str, tier: str, options: Namespace) -> Part:
    """The first question about each picture after a restart, and the next, whose pixels and features are in RAM."""
    talks = some(PNG, options.restarted)
    with stored(tier) as store:
        with server(side, SMALL_KV, store=store) as up:
            asked(up, talks)
            settle(up)
        with server(side, SMALL_KV, store=store) as up:
            yield (f"restart, {tier}, first", side), asked(up, talks)
            yield (f"restart, {tier}, next", side), asked(up, talks)


def settle(up: probing.Probed) -> None:
    """Wait until the plugin has stored as much as it will: its counters come with the next question."""
    deadline, seen = time.monotonic() + SETTLE_TIMEOUT_S, -1.0
    words = talk([{"type": "text", "text": "Nothing to look at."}])
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        ask(up, words)
        before, seen = seen, counters(up.server.url).get("features_saved", 0.0)
        if seen == before:
            return


def by_size(side: str, form: str, options: Namespace) -> Part:
    """What a picture costs by its size, unknown and after it has fallen out of the cache; one question at a time."""
    kinds = {f"{width}x{height}": FORMATS[form]._replace(size=(width, height)) for width, height in SIZES}
    pictures = {size: some(kind, options.samples) for size, kind in kinds.items()}
    width, height = SIZES[-1]
    with server(side, LARGE, max_pixels=width * (height + 32)) as up:
        for when in ("unknown", "again"):
            for size, talks in pictures.items():
                yield (f"{form} {size}, {when}", side), asked(up, talks) | encoded_bytes(kinds[size])


def many(name: str, max_pixels: int, options: Namespace) -> Part:
    """Unknown pictures at once, and one alone; both servers are up, and are asked in turn.

    The tower of the zoo takes most of the time for a large picture here, and a moment on a GPU. Where the processor
    makes pictures small, what comes before the tower is left.
    """
    photo = PNG._replace(size=(1920, 1080))
    alone, cpu_s = ({side: list[float]() for side in SIDES} for _ in range(2))
    at_once = {side: list[float]() for side in SIDES}
    with contextlib.ExitStack() as stack:
        up = {side: stack.enter_context(server(side, MANY, max_pixels=max_pixels)) for side in SIDES}
        for side in SIDES:  # the first of its size is slower
            ask(up[side], some(photo, 1)[0])
        for number in range(options.rounds_at_once):
            for side in SIDES[:: -1 if number % 2 else 1]:
                unknown = [one.body(question()) for one in some(photo, options.at_once)]
                costs, url = Costs(), up[side].server.url
                with costs.of(up[side], len(unknown)), ThreadPoolExecutor(len(unknown)) as pool:
                    start = time.perf_counter()
                    list(pool.map(partial(first_token_s, url), unknown))
                    costs.seconds = [time.perf_counter() - start]
                at_once[side] += costs.seconds
                cpu_s[side].append(costs.numbers()["api_server_cpu_s"])
            for one in range(options.alone):
                for side in SIDES[:: -1 if one % 2 else 1]:
                    alone[side].append(ask(up[side], some(photo, 1)[0]))
    for side in SIDES:
        yield (f"{name}, at once", side), spread(at_once[side]) | {"api_server_cpu_s": median(cpu_s[side])}
        yield (f"{name}, alone", side), spread(alone[side])


def videos(side: str, options: Namespace) -> Part:
    """Videos asked about several times, and once after a restart, with the store on disk; nothing without videos."""
    urls = [f"data:video/mp4;base64,{base64.b64encode(video(number)).decode()}" for number in range(1 + options.videos)]
    warm_up, *talks = (talk([{"type": "video_url", "video_url": {"url": url}}]) for url in urls)
    again = Costs()
    with tempfile.TemporaryDirectory() as store:
        with server(side, VIDEOS, store=store) as up:
            ask(up, warm_up)
            yield ("video, first", side), asked(up, talks)
            for _ in range(VIDEO_TIMES - 1):
                again.each(up, talks)
            yield ("video, again", side), again.numbers()
            settle(up)
        with server(side, VIDEOS, store=store) as up:
            ask(up, warm_up)
            yield ("video, restarted", side), asked(up, talks)


# By name: what measures a part, and the options that say how large it is.
PARTS: dict[str, tuple[Callable[[Namespace], Part], tuple[str, ...]]] = {
    **{f"rotation-{side}{'-all' * holds_all}":
           (partial(rotation, side, holds_all), ("images", "rounds", "cache_gib"))
       for holds_all in (False, True) for side in SIDES},
    **{f"restart-{tier}-{side}": (partial(restart, side, tier), ("restarted",))
       for tier in ("disk", "valkey") for side in SIDES},
    **{f"costs-{form}-{side}": (partial(by_size, side, form), ("samples",)) for form in FORMATS for side in SIDES},
    **{name: (partial(many, name, pixels), ("at_once", "rounds_at_once", "alone"))
       for name, pixels in (("many", 1920 * 1088), ("many-small", 640 * 384))},
    **{f"video-{side}": (partial(videos, side), ("videos",)) for side in SIDES},
}  # fmt: skip
