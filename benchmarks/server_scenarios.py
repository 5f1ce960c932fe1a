# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of real servers, but for processor.py: each of them a scenario, and what its numbers are made of.

- warm_turn: the same images and a new question; all images and their tokens are cached. Several conversations at once
  hold the same images, so that the server's caches need not be larger than for one.
- load: many conversations at once for minutes, on the cores that the clients use, too. A fifth of the time is warm-up.
- memory: what each process has grown by, while the server sees more and more images.
- random_mm: vLLM's own `vllm bench serve`, twice with the same seed, so the second run asks what the first one did.
- kv_restart: agents' conversations go on after a restart: a server is asked each once, then another one the same turns,
  as clients do whose requests were lost. `mmcache` and `stock` keep KV with vLLM's ExampleConnector, `none` is without.

In load and memory the caches that may fill for hours are small, on both sides alike, so that they are soon full.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import linear_regression, median, quantiles
from typing import Any, get_args

import httpx

from benchmarks.pictures import (
    JPEG,
    PHOTOGRAPH,
    PNG,
    SCREEN,
    SMALL,
    Kind,
    Pictured,
    data_url,
    picture,
    url_of,
    variant,
)
from benchmarks.probing import RECEIVE, Probed
from benchmarks.processes import MIB
from benchmarks.results import ROOT
from benchmarks.scenarios import (
    Client,
    Counted,
    Life,
    Scenario,
    Seen,
    Step,
    Talk,
    asks,
    each,
    for_a_question,
    questions,
)
from benchmarks.screenshots import Format, Page, Screenshot
from benchmarks.servers import HEADERS, MODEL, PATH, Body, Reply, ask, counters, image_part, read_reply, request, talk
from vllm_mmcache.client import OnceTransport
from vllm_mmcache.exactness.conversations import filler

NUM_WARM_UPS = 2
SMALL_CACHES = {"MMCACHE_FEATURE_RAM_BYTES": "64MiB"}
SMALL_ARGS = ("--mm-processor-cache-gb", "0.25", "--num-gpu-blocks-override", "2048")
WITH_USAGE = {"ignore_eos": True, "stream_options": {"include_usage": True}}


def about(kind: Pictured, contents: list[bytes]) -> Talk:
    return talk(*(image_part(data_url(kind, content)) for content in contents))


SIZES: dict[str, tuple[tuple[int, int], Format]] = {
    "1920x1080 JPEG": ((1920, 1080), "jpeg"),
    "1280x720 PNG": ((1280, 720), "png"),
    "2400x1080 PNG": ((2400, 1080), "png"),
}
SCREENSHOTS = {f"{name}, {page}": Screenshot(page, *kind) for page in get_args(Page) for name, kind in SIZES.items()}
PICTURES: dict[str, Pictured] = {
    **SCREENSHOTS,
    "photographs, JPEG": PHOTOGRAPH,
    "noise, 1280x720 PNG": PNG,
    "noise, 1920x1080 JPEG": JPEG,
}
"""What a warm turn is about, by the names that the option `pictures` has."""
LARGE_CACHE = ("--mm-processor-cache-gb", "16")  # GiB, of which all pictures of a run need 3
WAYS = ("", ", uuids alone", ", received", ", client transport")


def warm_turn(options: Namespace, side: str, store: str) -> Iterator[Life]:
    """All ways of a turn in turn, so that what else the machine does tells none of them apart.

    `received` only brings the same bytes to the same process. `stock_best` is stock with a cache for all that the
    processor makes; whatever the side, the client transport is one of the ways.
    """
    steps, transport = list[Step](), OnceTransport(httpx.HTTPTransport())
    for name in options.pictures:
        urls = [url_of(PICTURES[name], number) for number in range(options.images)]
        uuids = [f"{name} {number}" for number in range(options.images)]
        known, alone = talk(*map(image_part, urls)), talk(*(image_part(None, uuid) for uuid in uuids))
        asked: list[tuple[Talk, Callable[[str, Body], Reply]]] = [
            (known, ask), (alone, ask), (known, partial(ask, path=RECEIVE)), (known, partial(ask_through, transport)),
        ]  # fmt: skip
        steps.append(Step("", each([known, talk(*map(image_part, urls, uuids))])))
        for case in [*[""] * NUM_WARM_UPS, *[name] * options.turns]:
            steps += [
                Step(case and case + way, asks(questions([asks_for]), ask=how))
                for way, (asks_for, how) in zip(WAYS, asked, strict=True)
            ]
        if name == options.pictures[0]:
            for case, number in (("", 1), ("conversations at once", options.turns_at_once)):
                steps.append(Step(case, asks(*(questions([known] * number) for _ in range(options.conversations)))))
    for name in options.pictures:
        files = [picture(PICTURES[name], number) for number in range(options.images)]
        unknown = [
            about(PICTURES[name], [variant(one, f"{name} {turn}") for one in files]) for turn in range(options.cold)
        ]
        steps.append(Step(f"{name}, unknown", each(unknown)))
    args = ("--max-model-len", "16384", *(LARGE_CACHE if side == "stock_best" else ()))
    yield Life(steps, args, {"VLLM_CPU_KVCACHE_SPACE": "2"}, options.images)


def of_warm_turn(options: Namespace, seen: Mapping[str, Seen]) -> Counted:
    """Medians; and the time of a turn by that of its uuids and of receiving its bytes, in the median of the rounds."""
    yield from for_a_question(options, {case: one for case, one in seen.items() if not case.endswith(WAYS[2])})
    for name in options.pictures:
        yield (name, "file_bytes"), median(len(picture(PICTURES[name], number)) for number in range(options.images))
        turns, alone, received = (seen[name + way].times_s for way in WAYS[:3])
        yield (name + WAYS[2], "first_token_s"), median(received)
        rounds = zip(turns, alone, received, strict=True)
        yield (name, "by_uuids_and_receiving"), median(turn / (one + other) for turn, one, other in rounds)


def ask_through(transport: OnceTransport, url: str, body: Body) -> Reply:
    """The same through the client's transport, which gets the serialised request with all bytes."""
    asked = httpx.Request("POST", url + PATH, content=b"".join(body), headers=HEADERS)
    start = time.perf_counter()
    with contextlib.closing(transport.handle_request(asked)) as answer:
        lines = answer.iter_lines()
        first, first_s = next(lines), time.perf_counter() - start
        if answer.status_code != 200:
            raise RuntimeError(f"{url} answered {answer.status_code}: {first[:500]}")
        return read_reply(first_s, time.perf_counter() - start, [first, *lines])


WARM_UP = 0.2  # of the time
SETTLED_S = 120  # of load, before a growth of memory says anything: caches fill first
NUM_SCREENS = 4  # drawn; every one that is sent is a variant of one of them
TURNS = 12  # of a conversation; a screenshot comes with every other one
ANSWER_TOKENS = 16
RULES = "You look at screenshots and say what to do next. " * 12
QUESTION = "This is step {} of task {}. What has changed, and what should be done next? " + "Be brief. " * 6
PAUSE_S = 1.0  # after a failure


def load(options: Namespace, side: str, store: str) -> Iterator[Life]:
    """First conversations are of different lengths: at any time they are of all ages, and the load is the same."""
    args = (*SMALL_ARGS, "--dtype", "bfloat16" if options.family == "qwen3.5" else "float32")
    screens, tasks, number = [picture(SCREEN, one) for one in range(NUM_SCREENS)], count(), options.conversations
    clients = (agent(screens, tasks, 1 + one * TURNS // number) for one in range(number))
    yield Life([Step("load", asks(*clients, seconds=options.seconds))], args, SMALL_CACHES, TURNS // 2)


def agent(screens: list[bytes], tasks: Iterator[int], turns: int) -> Client:
    """One conversation after the other, which grow; the next one begins at the last turn, or after a failure."""
    while True:
        task, messages = next(tasks), list[dict[str, Any]]([{"role": "system", "content": RULES}])
        for turn in range(turns):
            content = [{"type": "text", "text": QUESTION.format(turn, task)}]
            if turn % 2 == 0:
                screen = variant(screens[(task + turn) % NUM_SCREENS], f"{task} {turn}")
                content.insert(0, image_part(data_url(SCREEN, screen)))
            messages.append({"role": "user", "content": content})
            try:
                reply = yield [json.dumps(request(messages, ANSWER_TOKENS, **WITH_USAGE)).encode()]
            except Exception:  # it is counted
                time.sleep(PAUSE_S)
                break
            if reply.answer_tokens != ANSWER_TOKENS:
                raise RuntimeError(f"an answer of {reply.answer_tokens} tokens instead of {ANSWER_TOKENS}")
            messages.append({"role": "assistant", "content": reply.text})
        turns = TURNS


def of_load(options: Namespace, seen: Mapping[str, Seen]) -> Counted:
    """Raises: RuntimeError where there are too few requests to measure."""
    found = seen["load"]
    start_s = min((reply.start_s for reply in found.replies), default=0.0) + WARM_UP * options.seconds
    replies = [reply for reply in found.replies if reply.start_s >= start_s]
    if len(replies) < 2:
        raise RuntimeError(f"{len(replies)} requests after a warm-up; failures: {found.failures[:3]}")
    end_s = max(reply.start_s + reply.whole_s for reply in replies)
    yield ("load", "requests_per_s"), len(replies) / (end_s - start_s)
    yield ("load", "failed"), len(found.failures)
    yield ("load", "decodes"), found.spent["decodes"]
    yield ("load", "requests"), len(found.replies)
    yield ("load", "requests_measured"), len(replies)
    for what in ("prompt_tokens", "cached_tokens"):
        yield ("load", what), sum(getattr(reply, what) for reply in replies)
    for what in ("first_token_s", "whole_s"):
        hundredths = quantiles([getattr(reply, what) for reply in replies], n=100, method="inclusive")
        yield ("p50", what), hundredths[49]
        yield ("p99", what), hundredths[98]
    for process in ("api_server", "engine"):
        sizes = [(at, memory[process] / MIB) for at, memory in found.memory]
        yield (process, "end_mib"), sizes[-1][1]
        yield (process, "most_mib"), max(size for _, size in sizes)
        if options.seconds >= SETTLED_S:
            later = zip(*(one for one in sizes if one[0] >= start_s), strict=True)
            yield (process, "slope_mib_per_minute"), linear_regression(*later).slope * 60


NUM_SIZES = 10  # times that memory is looked at


def memory(options: Namespace, side: str, store: str) -> Iterator[Life]:
    """The first request, in which the server loads what it needs for any image, is before the count."""
    kind = Kind("image/png", (options.size, options.size), 2, {"format": "PNG"})
    content, turns = picture(kind, 0), max(1, options.distinct // NUM_SIZES // options.images)
    unknown = (about(kind, [variant(content, f"{ask} {one}") for one in range(options.images)]) for ask in count())
    steps = [Step("0 images", each(islice(unknown, 1)))]
    for number in range(1, NUM_SIZES + 1):
        steps.append(Step(f"{number * turns * options.images} images", each(islice(unknown, turns))))
    yield Life(steps, SMALL_ARGS, SMALL_CACHES, options.images)


def of_memory(options: Namespace, seen: Mapping[str, Seen]) -> Counted:
    """MiB by the number of images that were seen; then what an image took in the second half."""
    sizes = {int(case.split()[0]): one.memory[-1][1] for case, one in seen.items()}
    steps = list(sizes)
    first, half, last = steps[0], steps[len(steps) // 2], steps[-1]
    for process in sizes[first]:
        for images, found in sizes.items():
            yield (f"{images} images", f"{process}_mib"), round(found[process] / MIB, 1)
        yield (process, "start_mib"), round(sizes[first][process] / MIB, 1)
        yield (process, "end_mib"), round(sizes[last][process] / MIB, 1)
        yield (process, "second_half_bytes_an_image"), (sizes[last][process] - sizes[half][process]) / (last - half)


VLLM = ROOT / "benchmarks" / "probe" / "vllm_main.py"
SEED = 0
BLOCK = 32  # tokens, as the benchmarks' servers have them
RUNS = ("first run", "same seed again")


def random_mm(options: Namespace, side: str, store: str) -> Iterator[Life]:
    steps = [Step(case, partial(vllm_bench, options)) for case in RUNS]
    yield Life(steps, ("--max-model-len", "8192"), images=options.images)


def vllm_bench(options: Namespace, up: Probed, seen: Seen) -> None:
    """One run of it as the client. Raises: RuntimeError where a request failed, or the command did."""
    url, hits = up.server.url, counters(up.server.url, "vllm")["prefix_cache_hits"]
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "backend": "openai-chat", "base-url": url, "endpoint": PATH, "tokenizer": up.model,
            "model": up.model, "served-model-name": MODEL, "dataset-name": "random-mm", "seed": SEED,
            "num-prompts": options.requests, "random-input-len": options.words, "random-output-len": 4,
            "random-mm-base-items-per-request": options.images, "random-mm-num-mm-items-range-ratio": 0,
            "random-mm-limit-mm-per-prompt": json.dumps({"image": options.images, "video": 0}),
            "random-mm-bucket-config": {(options.side, options.side, 1): 1.0}, "max-concurrency": options.at_once,
            "num-warmups": 0, "ready-check-timeout-sec": 0, "temperature": 0,
            "result-dir": folder, "result-filename": "said.json",
        }  # fmt: skip
        command = [sys.executable, str(VLLM), "bench", "serve", "--ignore-eos", "--disable-tqdm", "--save-result"]
        command += ["--save-detailed", *(str(one) for name, value in given.items() for one in (f"--{name}", value))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        path = Path(folder) / "said.json"
        said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if done.returncode or said.get("completed") != options.requests:
        raise RuntimeError(f"{said.get('completed', 0)} of {options.requests} requests: {done.stderr[-3000:]}")
    seen.replies += [Reply(*one) for one in zip(said["ttfts"], said["ttfts"], said["input_lens"], strict=True)]
    seen.prefix_cache_hits += counters(url, "vllm")["prefix_cache_hits"] - hits


def of_random_mm(options: Namespace, seen: Mapping[str, Seen]) -> Counted:
    """All requests together. The first run has nothing to reuse: what its best possible would be is left out."""
    for case, one in seen.items():
        prompts = [reply.prompt_tokens for reply in one.replies]
        yield (case, "first_token_s"), median(one.times_s)
        yield (case, "prompt_tokens"), sum(prompts)
        yield (case, "cached_tokens"), one.prefix_cache_hits
        for what in ("decodes", "tower_runs"):
            yield (case, what), one.spent[what]
        if case != RUNS[0]:
            yield (case, "best_tokens"), sum((tokens - 1) // BLOCK * BLOCK for tokens in prompts)


MAX_TOKENS = "16384"  # of a prompt, and of a step: ExampleConnector keeps what one step has calculated


def kv_restart(options: Namespace, side: str, store: str) -> Iterator[Life]:
    args = ["--max-model-len", MAX_TOKENS, "--max-num-batched-tokens", MAX_TOKENS, "--enable-prompt-tokens-details"]
    if side != "none":
        extra = {"shared_storage_path": tempfile.mkdtemp(dir=store)}
        transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        args += ["--kv-transfer-config", json.dumps(transfer)]
    bodies = [agents_turn(options, number) for number in range(options.talks)]
    for case in ("restart",) if side == "none" else ("", "restart"):
        steps = [Step(case, asks(questions([partial(list, [body]) for body in bodies])))]
        yield Life(steps, args, {"MMCACHE_STORE": f"{store}/store"}, options.images)


def agents_turn(options: Namespace, number: int) -> bytes:
    """A request: what is to be done, then a screenshot of each step and the click that followed."""
    kind = Kind("image/png", (options.width, options.height), 20, {"format": "PNG", "compress_level": 6})
    rules = f"You use computer {number}." + filler(300, number)
    messages: list[dict[str, Any]] = [{"role": "system", "content": rules}]
    for step in range(options.images):
        said = {"type": "text", "text": f"Step {step}." + filler(10, step)}
        messages.append({"role": "user", "content": [said, image_part(url_of(kind, 100 * number + step))]})
        messages.append({"role": "assistant", "content": f"Click at {step}." + filler(20, step)})
    return json.dumps(request(messages[:-1], 4, logprobs=True, **WITH_USAGE)).encode()


def uuid_turns(options: Namespace, side: str, store: str) -> Iterator[Life]:
    """The first turn carries the images, the others name them by uuid alone; all of it is cached."""
    names = [f"conversation-{number}" for number in range(options.images)]
    whole = talk(*(image_part(url_of(SMALL, number), name) for number, name in enumerate(names)))
    alone = talk(*(image_part(None, name) for name in names))
    steps = Step("", each([whole])), Step("", each([alone] * 5)), Step("uuid-only turn", each([alone] * options.turns))
    yield Life(steps, images=options.images)


SCENARIOS = {
    "warm_turn": Scenario(
        warm_turn, of_warm_turn, max_pixels=768 * 768
    ),  # 576 tokens an image: 20 fit into the 16,384 positions
    "load": Scenario(load, of_load, max_pixels=512 * 512),  # 256 tokens a screenshot: more than two cores can't serve
    "memory": Scenario(memory, of_memory),
    "random_mm": Scenario(random_mm, of_random_mm),
    "kv_restart": Scenario(kv_restart, is_same=True),
}
