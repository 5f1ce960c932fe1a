# SPDX-License-Identifier: Apache-2.0
"""What is measured, in parts of at most 10 minutes each: a part is one scenario, on one side where that is enough.

A picture has fallen out of vLLM's processor cache when others have come since that fill it. One of 1280x720 takes
5.4 MB of it, in bytes, for vLLM normalises the pixels of this model in the worker: 0.25 GiB are 49. The KV cache holds
two, so that no question is answered from it, and the worker's own cache of the tower's outputs holds two, so that known
features come from the plugin's RAM.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.pictures import SMALL
from benchmarks.processes import MIB
from benchmarks.processor.asking import Asked, about, ask, at_once, costs, each, measured_server, spread, together
from benchmarks.processor.pictures import FORMATS, PHOTO, SCREEN, SIZES, some, video, video_part
from benchmarks.results import ROOT
from benchmarks.servers import (
    SMALL_ARGS,
    SMALL_CACHES,
    counters,
    first_token_s,
    memory,
    question,
    stored,
    talk,
    zoo_server,
)
from benchmarks.sides import SIDES
from vllm_mmcache.demo.server import Server
from vllm_mmcache.zoo import build_cached
from vllm_mmcache.zoo.configs import ZooOptions

FAMILY = "qwen3-vl"
HOLDS_ALL = 4.0  # GiB of the processor cache, which is vLLM's own default: 790 pictures
HELD = 4  # pictures that stay in a small one while only they are asked about
HELD_TIMES = 3
BLOCK = 40  # pictures in rotation between two rounds of those that stay
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
TIMES = 5  # that a video is asked about
ZOO = ROOT / ".artifacts" / "processor" / "zoo"  # the same in all runs: features are those of a model by its name
SETTLED_S, SETTLE_TIMEOUT_S = 2.0, 30.0
MEMORY_STEPS, IMAGES_AT_ONCE = 10, 20

Options = argparse.Namespace
Result = dict[str, Any]


@contextlib.contextmanager
def server(
    side: str, args: Sequence[str], options: Options, max_pixels: int = ZooOptions().max_pixels, store: str = ""
) -> Iterator[Asked]:
    """A server of the zoo's model that has answered a question about an image of no part."""
    model = build_cached(FAMILY, ZOO, options=ZooOptions(max_pixels=max_pixels))
    with measured_server(model, side, args, {"MMCACHE_STORE": store}) as up:
        ask(up, about(some(SMALL, 1)[0]))
        yield up


def rotation(side: str, holds_all: bool, options: Options) -> Result:
    """Pictures in rotation that have all fallen out of the cache when they come again, and a few that stay in it.

    Both in one server, in turn, so that neither drift nor the start tells them apart. In a cache that holds all,
    nothing has fallen out.
    """
    pictures = some(SCREEN, options.images)
    talks, staying = [about(one) for one in pictures], [about(one) for one in some(SCREEN, HELD)]
    again, held = [], []
    cache_gib = HOLDS_ALL if holds_all else options.cache_gib
    with server(side, (*SMALL_KV, "--mm-processor-cache-gb", str(cache_gib)), options) as up:
        unknown = each(up, talks)
        each(up, staying)
        for _ in range(options.rounds - 1):
            for start in range(0, len(talks), BLOCK):
                again.append(each(up, talks[start : start + BLOCK]))
                each(up, staying)
                held.append(each(up, staying * HELD_TIMES))
    return {
        "encoded_bytes": round(sum(size for _, size in pictures) / len(pictures)),
        "unknown": together([unknown]),
        "again": together(again),
        "held": together(held),
    }


def restart(side: str, tier: str, options: Options) -> Result:
    """The first question about each picture after a restart, and the next, whose pixels and features are in RAM."""
    talks = [about(one) for one in some(SCREEN, options.restarted)]
    with stored(tier) as store:
        with server(side, SMALL_KV, options, store=store) as up:
            each(up, talks)
            settle(up.server)
        with server(side, SMALL_KV, options, store=store) as up:
            return {"first": together([each(up, talks)]), "again": together([each(up, talks)])}


def settle(up: Server) -> None:
    """Wait until the plugin has stored as much as it will: its counters come with the next question."""
    deadline, seen = time.monotonic() + SETTLE_TIMEOUT_S, -1.0
    words = talk([{"type": "text", "text": "Nothing to look at."}])
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        first_token_s(up.url, words.body(question()))
        before, seen = seen, counters(up.url).get("features_saved", 0.0)
        if seen == before:
            return


def image_costs(side: str, form: str, options: Options) -> Result:
    """What a picture costs by its size, unknown and after it has fallen out of the cache; one question at a time."""
    pictures = {size: some(FORMATS[form]._replace(size=size), options.samples) for size in SIZES}
    width, height = SIZES[-1]
    found: Result = {f"{width}x{height}": {} for width, height in SIZES}
    with server(side, LARGE, options, max_pixels=width * (height + 32)) as up:
        for when in ("unknown", "again"):
            for (width, height), several in pictures.items():
                row = together([each(up, [about(one)]) for one in several])
                bytes_each = round(sum(size for _, size in several) / len(several))
                found[f"{width}x{height}"] |= {when: row, "encoded_bytes": bytes_each}
    return found


def many(max_pixels: int, options: Options) -> Result:
    """Unknown pictures at once, and one alone; both servers are up, and are asked in turn.

    The tower of the zoo takes most of the time for a large picture here, and a moment on a GPU. Where the processor
    makes pictures small, what comes before the tower is left.
    """
    alone: dict[str, list[float]] = {side: [] for side in SIDES}
    together_s: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu_s: dict[str, list[float]] = {side: [] for side in SIDES}
    with contextlib.ExitStack() as stack:
        up = {side: stack.enter_context(server(side, MANY, options, max_pixels=max_pixels)) for side in SIDES}
        for side in SIDES:  # the first of its size is slower
            ask(up[side], about(some(PHOTO, 1)[0]))
        for number in range(options.rounds_at_once):
            for side in SIDES[:: -1 if number % 2 else 1]:
                unknown = [about(one) for one in some(PHOTO, options.at_once)]
                with costs(up[side], len(unknown)) as found:
                    together_s[side].append(at_once(up[side], unknown))
                cpu_s[side].append(found["api_server_cpu_s"])
            for one in range(options.alone):
                for side in SIDES[:: -1 if one % 2 else 1]:
                    alone[side].append(ask(up[side], about(some(PHOTO, 1)[0])))
    return {side: {"at_once": spread(together_s[side]), "alone": spread(alone[side]),
                   "api_server_cpu_s": spread(cpu_s[side])} for side in SIDES}  # fmt: skip


def videos(side: str, options: Options) -> Result:
    """Videos asked about several times, and once after a restart, with the store on disk; {"left_out": why} without."""
    some_talks = [talk([video_part(video(number))]) for number in range(1 + options.videos)]
    with tempfile.TemporaryDirectory() as store:
        with server(side, VIDEOS, options, store=store) as up:
            try:
                ask(up, some_talks[0])
            except RuntimeError as error:
                if "answered 400" not in str(error):
                    raise
                return {"left_out": str(error)}
            rounds = [each(up, some_talks[1:]) for _ in range(TIMES)]
            settle(up.server)
        with server(side, VIDEOS, options, store=store) as up:
            ask(up, some_talks[0])
            after = each(up, some_talks[1:])
    return {"first": together(rounds[:1]), "again": together(rounds[1:]), "restarted": together([after])}


def known_images(side: str, options: Options) -> Result:
    """Memory while more and more small pictures become known; the caches that hold pixels and features are small."""
    model = build_cached(FAMILY, ZOO)
    with zoo_server(model, side, images=IMAGES_AT_ONCE, args=SMALL_ARGS, env=SMALL_CACHES) as up:
        seen = memory(up, SMALL, IMAGES_AT_ONCE, options.known, MEMORY_STEPS)
        counted = counters(up.url)
    sizes = {process: [(images, round(sizes[process] / MIB, 1)) for images, sizes in seen] for process in seen[0][1]}
    return {"images_mib": sizes, "counted": counted}


PARTS: dict[str, Callable[[Options], Result]] = {
    **{f"rotation-{side}": partial(rotation, side, False) for side in SIDES},
    **{f"rotation-{side}-all": partial(rotation, side, True) for side in SIDES},
    **{f"restart-{tier}-{side}": partial(restart, side, tier) for tier in ("disk", "valkey") for side in SIDES},
    **{f"costs-{form}-{side}": partial(image_costs, side, form) for form in FORMATS for side in SIDES},
    "many": partial(many, 1920 * 1088),
    "many-small": partial(many, 640 * 384),
    **{f"video-{side}": partial(videos, side) for side in SIDES},
    **{f"memory-{side}": partial(known_images, side) for side in SIDES},
}

# The options that say how large a part is, by the first word of its name.
USED: dict[str, tuple[str, ...]] = {
    "rotation": ("images", "rounds", "cache_gib"),
    "restart": ("restarted",),
    "costs": ("samples",),
    "many": ("at_once", "rounds_at_once", "alone"),
    "video": ("videos",),
    "memory": ("known",),
}
