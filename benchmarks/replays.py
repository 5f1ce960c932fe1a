# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that are requests to one engine of each side, and the engine itself, for others, too.

Of each case and family the result has the median time of a request, and over all requests that count: tokens cached,
the best possible, and computed; steps of the engine; images that the vision tower ran for (tower_runs), and how often
it was called for them; pictures decoded; bytes of the data URLs; how many answers are another than stock's.
`pairs_ratio` is the time by that of the same request on stock, in the median of all pairs.
"""

import contextlib
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mmcache_tools.harness.engines import EngineConfig, ZooRig
from mmcache_tools.zoo import ZooOptions, build_cached
from PIL.ImageFile import ImageFile

from benchmarks import workloads
from benchmarks.results import SIDES, Result, in_turn, run_worker
from benchmarks.servers import stored
from benchmarks.workloads import SHAPES, Asks, rotation
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer
from vllm_mmcache.prove.workloads import put, questions, reusable, shared

COUNTED = (
    "cached_tokens", "best_tokens", "computed_tokens", "steps", "tower_runs", "tower_calls", "decodes", "url_bytes",
)  # fmt: skip
# Qwen's towers see as many patches as the picture has: 4,096 of 1024x1024 pixels. Gemma 4's is a setting of servers;
# the zoo's 70 tokens are 630 patches, too few to show. 560 tokens are 5,040, and 20 pictures are more than vLLM's own
# encoder cache, which has room for the tokens of a step. The window holds an image, as in the published larger models.
LARGE_IMAGES = {"gemma4": {"mm_processor_kwargs": {"max_soft_tokens": 560}}}
ZOO = {"gemma4": ZooOptions(sliding_window=1024)}


class Replay(NamedTuple):
    """`asks`: workloads by case, given the options and the family. `engine`: of EngineConfig.

    Cases share a process, and each is asked from cold; but those of STORES keep features in that tier, each in a
    process of its own, and where it is `restarted`, another process with the same store was asked the same before.
    The conversations of a case that AT_ONCE names are asked so many at once, and none of them needs an answer.
    """

    asks: Callable[[Namespace, str], Mapping[str, Asks]]
    engine: Mapping[str, Any]
    max_tokens: int = 1
    zoo: ZooOptions | None = None
    restarted: bool = False


AT_ONCE = {"cold, 16 at once": 16}
STORES = {"unknown": "disk", "disk": "disk", "valkey": "valkey"}
LONG, SCREENS = {"max_tokens": 9216, "num_images": 10}, {"max_tokens": 16384, "num_images": 9}
REPLAYS = {
    "image_questions": Replay(lambda _, family: {
        "20 images x 2 questions": questions(SHAPES[family], 20, 2),
        "20 images x 5 questions, interleaved": workloads.interleaved(SHAPES[family], 20, 5),
        "two demo images, varying query image, 20 queries": workloads.demos(SHAPES[family], 20),
    }, LONG, max_tokens=4),
    "cold_requests": Replay(lambda given, family: {
        "cold": workloads.cold(family, given.rounds),
        "cold, 16 at once": workloads.cold(family, 16 * given.rounds_at_once, workloads.AT_ONCE_FROM),
    }, {**LONG, "num_seqs": 16}),
    "agents": Replay(lambda given, _: {
        "agent replay, 18 turns": workloads.agent(18),
        "window of 5 screenshots, 15 turns": workloads.window(15, 5),
        "photographs, each once": workloads.photos(given.photos),
    }, {"max_tokens": 9216, "num_images": 8}, max_tokens=4),
    "computer_use": Replay(lambda given, _: {
        f"{live} live" + f", removed {chunk} at once" * (chunk > 1): workloads.computer_use(given.steps, live, chunk)
        for chunk in given.removed_at_once for live in given.windows
    }, SCREENS, max_tokens=8),
    "image_service": Replay(lambda given, _: {
        f"{again:.0%} again": workloads.image_service(given.requests, again) for again in (0.0, 0.5)
    }, SCREENS, max_tokens=8, zoo=ZooOptions(max_pixels=1300 * 1024)),
    "gallery": Replay(lambda given, family: {
        "in rotation": rotation(given.images, given.size, 3),
        "text alone": workloads.text_alone(family, given.images),
        "unknown": workloads.all_new(given.images, given.size),
    }, {"max_tokens": 4096}),
    "restart": Replay(lambda given, _: {
        tier: rotation(given.images, given.size, 1, 0) for tier in given.tiers
    }, {"max_tokens": 4096}, restarted=True),
}  # fmt: skip


def measure(name: str, options: Namespace) -> Result:
    """Every family and case on both sides, in turn."""
    result = Result()
    for family in options.families:
        found: dict[str, dict[str, list[Any]]] = {}
        for side in in_turn(options.repeats):
            for case, asked in one_side(name, side, family, options).items():
                found.setdefault(case, {one: [] for one in SIDES})[side] += asked
        for case, sides in found.items():
            add(result, f"{family}, {case}", sides)
    return result


def one_side(name: str, side: str, family: str, options: Namespace) -> dict[str, list[dict[str, Any]]]:
    """The requests of all cases, in as few processes as there may be."""
    task: dict[str, Any] = {"benchmark": name, "family": family, "options": vars(options)}
    call, cases = "benchmarks.replays:replayed", list(REPLAYS[name].asks(options, family))
    found: dict[str, list[dict[str, Any]]] = {}
    if together := [case for case in cases if case not in STORES]:
        found = run_worker(call, side, cases=together, settings={}, **task)
    for case in [case for case in cases if case in STORES]:
        with stored(STORES[case]) as store, tempfile.TemporaryDirectory() as root:
            for _ in range(1 + REPLAYS[name].restarted):
                found |= run_worker(call, side, cases=[case], settings={"store": store}, root=root, **task)
    return found


def replayed(
    root: Path, benchmark: str, cases: list[str], family: str, options: dict[str, Any], settings: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """The requests of some cases, by case, each from cold, on one engine."""
    replay, found = REPLAYS[benchmark], {}
    asks = replay.asks(Namespace(**options), family)
    with started(root, family, settings, replay.zoo, **replay.engine) as rig:
        work = Work(rig)
        for case in cases:
            rig.make_cold()
            if number := AT_ONCE.get(case):
                found[case] = [work.cost(rig, asked, tag, replay.max_tokens)
                               for tag, asked in workloads.at_once(asks[case], number)]  # fmt: skip
            else:
                found[case] = requests(rig, work, asks[case], replay.max_tokens)
    return found


@contextlib.contextmanager
def started(
    root: Path, family: str, settings: Mapping[str, Any], zoo: ZooOptions | None = None,
    more: Mapping[str, Any] | None = None, **engine: Any,
) -> Iterator[ZooRig]:  # fmt: skip
    """An engine with vLLM's own block size and token budget; settings of the plugin are nothing to stock.

    Its model is in `root`: a process that is to find what another one saved needs the same, for vLLM's name of an image
    holds the path. `more`: arguments of vLLM's LLM().
    """
    more = {"additional_config": {"mmcache": dict(settings)}, **LARGE_IMAGES.get(family, {}), **(more or {})}
    config = EngineConfig(family, **{"block_tokens": None, "batched_tokens": None, **engine}, more=tuple(more.items()))
    rig = ZooRig(config, build_cached(family, root, options=zoo or ZOO.get(family)))
    try:
        yield rig
    finally:
        rig.close()


class Work:
    """Counts what an engine does: its steps with their tokens, the tower's calls and images, pictures decoded."""

    def __init__(self, rig: ZooRig) -> None:
        self.done = Counter[str]()
        embed, load, schedule = rig.runner.model.embed_multimodal, ImageFile.load, rig.scheduler.schedule

        def counted_embed(**kwargs: Any) -> Any:
            outputs = embed(**kwargs)
            self.done.update(tower_runs=len(outputs), tower_calls=1)
            return outputs

        def counted_load(picture: ImageFile) -> Any:
            self.done["decodes"] += bool(picture.tile)  # what is left to decode
            return load(picture)

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            tokens = step.total_num_scheduled_tokens
            self.done.update(steps=tokens > 0, computed_tokens=tokens)
            return step

        rig.runner.model.embed_multimodal = counted_embed
        ImageFile.load = counted_load  # type: ignore[method-assign, assignment]
        rig.scheduler.schedule = counted_schedule

    def cost(self, rig: ZooRig, conversations: list[list[Any]], tag: bool | str, max_tokens: int) -> dict[str, Any]:
        """What so many conversations cost that are asked at once; the time is that of all of them."""
        before, start = self.done.copy(), time.perf_counter()
        answers = rig.ask(*conversations, max_tokens=max_tokens)
        found: dict[str, Any] = {**dict.fromkeys(COUNTED, 0), "tag": tag, "time_s": time.perf_counter() - start}
        found |= {what: number - before[what] for what, number in self.done.items()}
        found["cached_tokens"] = sum(answer.num_cached_tokens for answer in answers)
        return {**found, "answer": [list(answer.token_ids) for answer in answers]}


def requests(rig: ZooRig, work: Work, asks: Asks, max_tokens: int) -> list[dict[str, Any]]:
    """Put all requests of a workload, one after the other; what each was and what it cost. Units: seconds, tokens.

    `best_tokens` is the longest prefix that a request shares with an earlier one, floored to the block size and without
    the last token.
    """
    seen: list[list[Any]] = []
    found: list[dict[str, Any]] = []

    def ask(tag: bool | str, conversation: list[Any]) -> Answer:
        before, start = work.done.copy(), time.perf_counter()
        answer = answered(rig, conversation, max_tokens)
        cost = {"time_s": time.perf_counter() - start, "cached_tokens": answer.num_cached_tokens}
        cost |= {what: work.done[what] - before[what] for what in COUNTED if what in work.done}
        pictures = pictures_of(conversation)
        content: list[Any] = list(answer.prompt_ids)
        for (first, end), name in zip(rig.image_spans(answer), pictures, strict=True):
            content[first:end] = [name] * (end - first)
        best = reusable(max((shared(content, other) for other in seen), default=0), content, rig.block_tokens)
        url_bytes = sum(len(one) for one in pictures if isinstance(one, str))
        found.append({**dict.fromkeys(COUNTED, 0), "tag": tag, **cost, "best_tokens": best, "url_bytes": url_bytes,
                      "answer": list(answer.token_ids)})  # fmt: skip
        seen.append([*content, *answer.token_ids])
        return answer

    list(put(ask, asks))
    return found


def answered(rig: ZooRig, conversation: list[Any], max_tokens: int) -> Answer:
    """To a conversation as clients' messages where its pictures are URLs, else to a prompt with pictures."""
    if not any(part["type"] == "image_url" for part in parts_of(conversation)):
        return rig.ask(conversation, max_tokens=max_tokens)[0]
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    return Answer.of("", (), rig.llm.chat([conversation], params, use_tqdm=False)[0])


def parts_of(conversation: list[Any]) -> list[Any]:
    return [part for message in conversation if not isinstance(message["content"], str) for part in message["content"]]


def pictures_of(conversation: list[Any]) -> list[Any]:
    """What tells the pictures apart, one after the other."""
    urls = [part["image_url"]["url"] for part in parts_of(conversation) if part["type"] == "image_url"]
    images = [part["image"] for part in parts_of(conversation) if part["type"] == "image"]
    return urls or [hash((image.size, image.tobytes())) for image in images]


def add(result: Result, case: str, sides: Mapping[str, list[dict[str, Any]]]) -> None:
    """The numbers of one case, or of the several that its requests belong to."""
    for tag in dict.fromkeys(one["tag"] for one in sides["stock"] if one["tag"]):
        kept = {side: [one for one in asked if one["tag"] == tag] for side, asked in sides.items()}
        name = f"{case}, {tag}" if isinstance(tag, str) else case
        result.add(name, "time_s", {side: median(one["time_s"] for one in asked) for side, asked in kept.items()})
        pairs = zip(kept["stock"], kept["mmcache"], strict=True)
        result.add(name, "pairs_ratio", {"mmcache": median(ours["time_s"] / stock["time_s"] for stock, ours in pairs)})
        result.add(name, "requests", {side: len(asked) for side, asked in kept.items()})
        result.add(name, "last_to_first", {side: last_to_first(asked) for side, asked in kept.items()})
        for what in COUNTED:
            result.add(name, what, {side: sum(one[what] for one in asked) for side, asked in kept.items()})
        others = sum(a["answer"] != b["answer"] for a, b in zip(*kept.values(), strict=True))
        result.add(name, "other_answers", {"mmcache": others})


def last_to_first(asked: list[dict[str, Any]]) -> float:
    """Median time in the last quarter by that in the first, the very first request left out."""
    seconds, quarter = [one["time_s"] for one in asked], len(asked) // 4
    return median(seconds[-quarter:]) / median(seconds[1 : quarter + 1]) if quarter else 1.0
