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
import json
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from benchmarks.pictures import Kind, video
from benchmarks.results import FOLDER, ROOT, SIDES, Result, committed, save
from benchmarks.rows import FALLEN_OUT, add_targets
from benchmarks.scenarios import Life, Scenario, Step, asks, each, new, questions, settle
from benchmarks.scenarios import measure as measure_scenario
from benchmarks.servers import talk

OUTPUT = ROOT / ".artifacts" / "processor"
PNG = Kind("image/png", (1280, 720), 2, {"format": "PNG", "compress_level": 1})  # about 0.8 MB, as screenshots are
FORMATS = {"png": PNG, "jpeg": Kind("image/jpeg", (1280, 720), 24, {"format": "JPEG", "quality": 86})}
SIZES = ((640, 480), (1280, 720), (1920, 1080), (2560, 1600), (3840, 2160))  # 0.3 to 8.3 megapixels
PHOTO = PNG._replace(size=(1920, 1080))

HOLDS_ALL = 4.0  # GiB of the processor cache, which is vLLM's own default: 790 pictures
HELD = 4  # pictures that stay in a small one while only they are asked about
HELD_TIMES = 3
BLOCK = 40  # pictures in rotation between two rounds of those that stay
VIDEO_TIMES = 5  # that a video is asked about
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


def rotation(holds_all: bool, options: Namespace, side: str, store: str) -> Iterator[Life]:
    """Pictures in rotation that have all fallen out of the cache when they come again, and a few that stay in it.

    Both in one server, in turn, so that neither drift nor the start tells them apart. In a cache that holds all,
    nothing has fallen out.
    """
    unknown, again, held = "rotation, unknown", FALLEN_OUT, "rotation, held"
    if holds_all:
        unknown, again, held = "rotation, unknown, a cache for all", "rotation, all in the cache", ""
    talks, staying = ([new(PNG) for _ in range(number)] for number in (options.images, HELD))
    steps = [Step(unknown, each(talks)), Step("", each(staying))]
    for start in list(range(0, len(talks), BLOCK)) * (options.rounds - 1):
        steps.append(Step(again, each(talks[start : start + BLOCK])))
        steps += [Step("", each(staying)), Step(held, each(staying * HELD_TIMES))]
    gib = HOLDS_ALL if holds_all else options.cache_gib
    yield Life(steps, (*SMALL_KV, "--mm-processor-cache-gb", str(gib)))


def restart(tier: str, options: Namespace, side: str, store: str) -> Iterator[Life]:
    """The first question about each picture after a restart, and the next, whose pixels and features are in RAM."""
    talks, env = [new(PNG) for _ in range(options.restarted)], {"MMCACHE_STORE": store}
    yield Life([Step("", each(talks)), Step("", settle)], SMALL_KV, env)
    yield Life([Step(f"restart, {tier}, {when}", each(talks)) for when in ("first", "next")], SMALL_KV, env)


def by_size(form: str, options: Namespace, side: str, store: str) -> Iterator[Life]:
    """What a picture costs by its size, unknown and after it has fallen out of the cache; one question at a time."""
    kinds = {f"{width}x{height}": FORMATS[form]._replace(size=(width, height)) for width, height in SIZES}
    talks = {size: [new(kind) for _ in range(options.samples)] for size, kind in kinds.items()}
    steps = (Step(f"{form} {size}, {when}", each(talks[size]))
             for when in ("unknown", "again") for size in kinds)  # fmt: skip
    yield Life(steps, LARGE)


def many(name: str, options: Namespace, side: str, store: str) -> Iterator[Life]:
    """Unknown pictures at once, and one alone; both servers are up, and are asked in turn.

    The tower of the zoo takes most of the time for a large picture here, and a moment on a GPU. Where the processor
    makes pictures small, what comes before the tower is left.
    """

    def steps() -> Iterator[Step]:
        yield Step("", each([new(PHOTO)]))  # the first of its size is slower
        for _ in range(options.rounds_at_once):
            unknown = (questions([new(PHOTO)]) for _ in range(options.at_once))
            yield Step(f"{name}, at once", asks(*unknown), is_whole=True)
            for _ in range(options.alone):
                yield Step(f"{name}, alone", each([new(PHOTO)]))

    yield Life(steps(), MANY)


def videos(options: Namespace, side: str, store: str) -> Iterator[Life]:
    """Videos asked about several times, and once after a restart, with the store on disk; nothing without videos."""
    urls = [f"data:video/mp4;base64,{base64.b64encode(video(number)).decode()}" for number in range(1 + options.videos)]
    first, *talks = (talk({"type": "video_url", "video_url": {"url": url}}) for url in urls)
    cases = ["video, first"] + ["video, again"] * (VIDEO_TIMES - 1)
    lives = [[Step(case, each(talks)) for case in cases] + [Step("", settle)], [Step("video, restarted", each(talks))]]
    for steps in lives:
        yield Life([Step("", each([first])), *steps], VIDEOS, {"MMCACHE_STORE": store})


class Part(NamedTuple):
    """`sizes`: the options that say how large it is."""

    scenario: Scenario
    sides: tuple[str, ...]
    sizes: tuple[str, ...]


ROTATION, LARGEST = ("images", "rounds", "cache_gib"), 3840 * 2192
PARTS = {
    **{f"rotation-{side}{'-all' * holds_all}": Part(Scenario(partial(rotation, holds_all)), (side,), ROTATION)
       for holds_all in (False, True) for side in SIDES},
    **{f"restart-{tier}-{side}": Part(Scenario(partial(restart, tier), tier=tier), (side,), ("restarted",))
       for tier in ("disk", "valkey") for side in SIDES},
    **{f"costs-{form}-{side}": Part(Scenario(partial(by_size, form), max_pixels=LARGEST), (side,), ("samples",))
       for form in FORMATS for side in SIDES},
    **{name: Part(Scenario(partial(many, name), max_pixels=pixels, is_together=True), SIDES,
                  ("at_once", "rounds_at_once", "alone"))
       for name, pixels in (("many", 1920 * 1088), ("many-small", 640 * 384))},
    **{f"video-{side}": Part(Scenario(videos), (side,), ("videos",)) for side in SIDES},
}  # fmt: skip


def measure(options: Namespace) -> Result:
    """What is missing; a part that failed is a problem, and the others go on.

    The result also has what the committed one has of parts that were not measured here, if it is of the same size.
    """
    result = Result()
    before = committed("processor") if (FOLDER / "processor.json").exists() else {"options": {}}
    if all(before["options"].get(one) == getattr(options, one) for part in PARTS.values() for one in part.sizes):
        result.found = {case: what for case, what in before["found"].items() if "ratio" not in what}
        result.details = dict(before["details"])
    for name in options.parts or PARTS:
        try:
            part = measured(name, options)
        except Exception as error:  # whatever it is: the other parts go on
            result.problems.append(f"failed: {name}: {type(error).__name__}: {error}")
            continue
        for case, counted in part.pop("found").items():
            put(result.found.setdefault(case, {}), counted)
        result.details[name] = part
    add_targets("processor", result)
    return result


def put(case: dict[str, dict[str, float]], counted: dict[str, dict[str, float]]) -> None:
    """Put what was counted of a case in the place of all that the case has of the same sides."""
    sides = {side for numbers in counted.values() for side in numbers}
    for what, numbers in list(case.items()):
        case[what] = {side: number for side, number in numbers.items() if side not in sides}
    for what, numbers in counted.items():
        case.setdefault(what, {}).update(numbers)
    for what in [what for what, numbers in case.items() if not numbers]:
        del case[what]


def measured(name: str, options: Namespace) -> dict[str, Any]:
    """One part, measured now or before: what was found, and where it is from."""
    path, part = OUTPUT / f"{name}.json", PARTS[name]
    sizes = {one: getattr(options, one) for one in part.sizes}
    if path.exists() and not options.again and json.loads(path.read_text())["options"] == sizes:
        print(f"{name} was measured before", flush=True)
    else:
        result = measure_scenario(part.scenario, options, part.sides)
        if result.problems:
            raise RuntimeError(result.problems[0])
        save(path, result, sizes)
    return dict(json.loads(path.read_text()))
