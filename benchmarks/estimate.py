# SPDX-License-Identifier: Apache-2.0
"""`mmcache estimate` beside the truth: recorded requests, what it predicts, and what servers then count for them.

Each workload is written as a log and read from it. Then stock and the plugin answer the same requests, one after the
other, on servers with a KV cache and an encoder cache that are too small for some of them. Beside that, the command
reads large logs: of screenshots, and of texts alone.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from mmcache_tools.zoo import build_cached

from benchmarks.pictures import Kind, url_of
from benchmarks.probing import Probed, probed_server
from benchmarks.results import SIDES, Result
from benchmarks.servers import ask, image_part, request
from vllm_mmcache.traffic.estimate import Estimate, Sizes
from vllm_mmcache.traffic.logs import Log
from vllm_mmcache.traffic.models import Model

SCREENSHOT = Kind("image/jpeg", (640, 400), 20, {"format": "JPEG", "quality": 90})
PICTURE = Kind("image/png", (320, 320), 20, {"format": "PNG"})
STEP_TOKENS = 2048
ARGS = (
    "--enable-prefix-caching", "--enable-prompt-tokens-details", "--block-size", "32",
    "--max-num-batched-tokens", str(STEP_TOKENS), "--max-model-len", "2048", "--dtype", "bfloat16",
)  # fmt: skip
WATCHED = """
import atexit, pathlib, sys
from vllm_mmcache.cli import main
lines = lambda: pathlib.Path("/proc/self/status").read_text().splitlines()
atexit.register(lambda: print(next(line for line in lines() if line.startswith("VmHWM")), file=sys.stderr))
main()
"""
"""The command, which at its end says the most memory that it has held; what its parent held would count in rusage."""
BLOCKS = {"qwen3-vl": (160, 32), "gemma3": (640, 32), "qwen3.5": (40, 160)}
"""How many blocks hold about 5,000 tokens, and how many tokens a hit is a multiple of."""
WORDS = "Look at the whole picture, then say in one sentence what it shows and what has changed. "
COUNTS = ("decodes", "tower_runs", "reused_tokens")

Request = dict[str, Any]


def measure(options: Namespace) -> Result:
    """By workload and side, what is predicted, what is counted, and the error as a share of what is counted.

    Where no token is reused, the error is a share of all tokens of prompts.
    """
    result = Result()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in options.families:
            model = build_cached(family, folder)
            num_blocks, block_tokens = BLOCKS[family]
            args = (*ARGS, "--num-gpu-blocks-override", str(round(num_blocks * options.room)))
            logs = {workload: folder / f"{family} {workload}.jsonl" for workload in options.workloads}
            for number, (workload, path) in enumerate(logs.items()):
                requests = WORKLOADS[workload](1000 * number)
                path.write_text("".join(json.dumps(one) + "\n" for one in requests))
            counted: dict[str, dict[str, dict[str, float]]] = {}
            for side in SIDES:
                with probed_server(model, side, 16, args, {}) as server:
                    room = num_kv_blocks(server) * block_tokens if rules_of(model).state_blocks else kv_tokens(server)
                    sizes = Sizes(room, STEP_TOKENS, block_tokens=block_tokens)
                    counted[side] = {workload: asked(server, path) for workload, path in logs.items()}
            for workload, path in logs.items():
                predicted = predict(model, path, sizes, counted["stock"][workload]["prompt_tokens"])
                add(result, f"{family}, {workload}", predicted, {side: counted[side][workload] for side in SIDES})
        for name, talk in {"screenshots": of_screenshots, "texts": of_texts}.items():
            path = folder / "large.jsonl"
            num_bytes = write_log(path, talk, options.log_bytes)
            seconds, most_mib = read_log(path)
            result.add(f"a log of {name}", "seconds_a_gb", {"mmcache": seconds * 1e9 / num_bytes})
            result.add(f"a log of {name}", "most_mib", {"mmcache": most_mib})
    return result


def kv_tokens(server: Probed) -> int:
    """What vLLM's log says of the KV cache's size, as the docs tell users to look it up."""
    said = re.search(r"KV cache size: ([\d,]+) tokens", server.server.log_path.read_text())
    if said is None:
        raise RuntimeError(f"{server.server.log_path} does not say how large the KV cache is")
    return int(said[1].replace(",", ""))


def num_kv_blocks(server: Probed) -> int:
    """How many blocks the KV cache has, as the docs tell users of models with Mamba layers to look it up."""
    with urllib.request.urlopen(f"{server.server.url}/metrics", timeout=30) as answer:
        said = re.search(r'^vllm:cache_config_info{.*num_gpu_blocks="(\d+)"', answer.read().decode(), re.MULTILINE)
    if said is None:
        raise RuntimeError("the server's metrics don't say how many blocks its KV cache has")
    return int(said[1])


def add(
    result: Result, case: str, predicted: dict[str, dict[str, float]], counted: dict[str, dict[str, float]]
) -> None:
    for what in COUNTS:
        result.add(case, what, {side: counted[side][what] for side in SIDES})
        result.add(case, f"predicted_{what}", {side: predicted[side][what] for side in SIDES})
        of = {side: counted[side][what] or counted[side]["prompt_tokens"] for side in SIDES}
        errors = {side: abs(predicted[side][what] - counted[side][what]) / of[side] for side in SIDES}
        result.add(case, f"error_of_{what}", errors)


def predict(model: Path, log: Path, sizes: Sizes, prompt_tokens: float) -> dict[str, dict[str, float]]:
    """What the estimate says. prompt_tokens: of all requests, from which follows how many characters a token has."""
    rules = rules_of(model)
    rough = played(rules, sizes, log)
    chars = (rough.seen.prompt_tokens - rough.seen.image_tokens) * sizes.chars_per_token
    chars_per_token = chars / (prompt_tokens - rough.seen.image_tokens)
    exact = played(rules, replace(sizes, chars_per_token=chars_per_token), log)
    return {
        side: {"decodes": done.decoded, "tower_runs": done.encoded, "reused_tokens": done.reused_tokens}
        for side, done in exact.done.items()
    }


def played(rules: Model, sizes: Sizes, log: Path) -> Estimate:
    estimate = Estimate(rules, sizes)
    estimate.add_all(Log([log]).prompts())
    return estimate


def rules_of(model: Path) -> Model:
    """Those of the zoo's processor."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model).image_processor
    if not hasattr(processor, "merge_size"):
        config = json.loads((model / "config.json").read_text())
        tokens, window = config["mm_tokens_per_image"], config["text_config"]["sliding_window"]
        return Model(
            model.name, fixed=tokens, mark_tokens=4, keeps_all_kv=False, window_tokens=window, feature_bytes=512
        )
    size = processor.size
    return Model(
        model.name,
        processor.patch_size * processor.merge_size,
        size["shortest_edge"],
        size["longest_edge"],
        mark_tokens=2,
        feature_bytes=512,
        keeps_all_kv="qwen3.5" not in model.name,
        state_blocks=3 * ("qwen3.5" in model.name),
    )


def asked(server: Probed, log: Path) -> dict[str, float]:
    """What a server has done for the requests of a log."""
    before, reused, prompts = server.spent(), 0, 0
    for line in log.read_text().splitlines():
        reply = ask(server.server.url, [line.encode()])
        reused += reply.cached_tokens
        prompts += reply.prompt_tokens
    spent = {what: number - before[what] for what, number in server.spent().items()}
    return {**{what: spent[what] for what in COUNTS[:2]}, "reused_tokens": reused, "prompt_tokens": prompts}


def turn(*parts: Any) -> Request:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def shown(number: int) -> Request:
    return image_part(url_of(PICTURE, number))


def asking(*messages: Request) -> Request:
    return request(messages, stream_options={"include_usage": True})


def agents(first: int) -> Iterator[Request]:
    """Conversations in turn, each with one more screenshot in each turn."""
    talks: list[list[Request]] = [[{"role": "system", "content": f"You are agent {n}. {WORDS * 4}"}] for n in range(3)]
    for step in range(6):
        for number, talk in enumerate(talks):
            talk.append(turn(f"Step {step}. {WORDS}", shown(first + 10 * number + step)))
            yield asking(*talk)
            talk.append({"role": "assistant", "content": f"Click at {step}, {number}. {WORDS}"})


def gallery(first: int) -> Iterator[Request]:
    """Pictures in rotation, behind another text each time."""
    for number in range(48):
        yield asking(turn(f"Visitor {number}. {WORDS}", shown(first + number % 12)))


def service(first: int) -> Iterator[Request]:
    """A few pictures that many ask about."""
    for number in range(40):
        yield asking(turn(shown(first + number * 7 % 5), f"Question {number}? {WORDS}"))


def documents(first: int) -> Iterator[Request]:
    """Documents of some pages, with three questions in turn about each."""
    for document in range(8):
        pages = [shown(first + 10 * document + page) for page in range(5)]
        for number in range(3):
            yield asking(turn(*pages, f"Question {number}? {WORDS}"))


def batch(first: int) -> Iterator[Request]:
    """Two questions about each of many pictures, all first ones before all second ones."""
    for number in range(120):
        yield asking(turn(shown(first + number % 60), f"Question {number // 60}? {WORDS}"))


def of_screenshots(random: Random) -> Iterator[Request]:
    """A conversation of an agent: each turn has one more of 400 screenshots."""
    messages: list[Request] = [{"role": "system", "content": WORDS * 10}]
    for step in range(random.randint(2, 12)):
        messages.append(turn(f"Step {step}. {WORDS}", image_part(url_of(SCREENSHOT, random.randrange(400)))))
        yield asking(*messages)
        messages.append({"role": "assistant", "content": f"Click at {random.random()}."})


def of_texts(random: Random) -> Iterator[Request]:
    """A conversation without images, in words that nobody has used before."""
    messages: list[Request] = []
    for _ in range(8):
        messages.append({"role": "user", "content": " ".join(f"{random.random()}" for _ in range(120))})
        yield asking(*messages)
        messages.append({"role": "assistant", "content": " ".join(f"{random.random()}" for _ in range(60))})


def write_log(path: Path, talk: Callable[[Random], Iterator[Request]], num_bytes: int) -> int:
    """Conversations one after the other until the file is as large. Returns its size."""
    random, written = Random(0), 0
    with path.open("w") as file:
        while written < num_bytes:
            for one in talk(random):
                written += file.write(json.dumps(one) + "\n")
    return written


def read_log(path: Path) -> tuple[float, float]:
    """Seconds that `mmcache estimate` takes for a log, and the most MiB of memory that it holds."""
    command = [sys.executable, "-c", WATCHED, "estimate", str(path), "--json"]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, int(done.stderr.split()[-2]) / 1024


WORKLOADS: dict[str, Callable[[int], Iterator[Request]]] = {
    "agents": agents, "gallery": gallery, "service": service, "documents": documents, "batch": batch,
}  # fmt: skip
