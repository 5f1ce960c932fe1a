# SPDX-License-Identifier: Apache-2.0
"""`vllm launch render` asked as a router asks it: for the tokens of a prompt and the ids of its images, without pixels.

The images are known: `seen here` to this process, `seen by another server` through the store alone, which a server with
the plugin has filled. Stock has no store, and meets those for the first time. What both answer must be equal.
"""

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from mmcache_tools.harness.server import Server
from mmcache_tools.zoo import build_cached

from benchmarks.pictures import PNG, url_of
from benchmarks.processes import server_cpu_s
from benchmarks.results import SIDES, Result
from benchmarks.servers import MODEL, PATH, image_part, zoo_renderer, zoo_server

ANOTHER, HERE = "seen by another server", "seen here"
MADE_ANEW = ("request_id", "id", "created")
"""Of an answer, what is another in each."""

Prompt = Sequence[int]
"""The numbers of its images."""


def measure(options: Namespace) -> Result:
    """By case and side, for a request: CPU seconds of the process, the mean, and seconds, the median."""
    result = Result()
    numbers = range(options.images)
    prompts = [numbers[start : start + options.in_prompt] for start in range(0, len(numbers), options.in_prompt)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, env = build_cached("qwen3-vl", folder / "model"), {"MMCACHE_STORE": str(folder / "store")}
        with zoo_server(model, "mmcache", images=options.in_prompt, env=env) as server:
            for prompt in prompts:
                asked(server, prompt, path="")
        found: dict[str, dict[tuple[str, str], float]] = {}
        answers: dict[str, list[str]] = {}
        for side in SIDES:
            log_path = folder / f"{side}.log"
            with zoo_renderer(model, side, images=options.in_prompt, log_path=log_path, env=env) as server:
                httpx.post(f"{server.url}{PATH}/render", json=body_of([], mm_payload="none"), timeout=120)  # warm
                first, answers[side] = timed(server, prompts)
                again, _ = timed(server, list(prompts) * options.rounds)
            found[side] = {(ANOTHER, what): number for what, number in first.items()}
            found[side] |= {(HERE, what): number for what, number in again.items()}
    result.add_sides(found)
    if answers["stock"] != answers["mmcache"]:
        result.problems.append("stock and the plugin say different tokens, ids or places of images")
    return result


def timed(server: Server, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[str]]:
    """What a request costs, and the answers. CPU time is counted in hundredths of a second, so its mean is given."""
    cpu_s, time_s, answers = [], [], []
    for prompt in prompts:
        cpu_before, start = server_cpu_s(server)["api_server"], time.perf_counter()
        answer = asked(server, prompt, path="/render", mm_payload="none")
        time_s.append(time.perf_counter() - start)
        cpu_s.append(server_cpu_s(server)["api_server"] - cpu_before)
        answers.append(json.dumps({name: value for name, value in answer.items() if name not in MADE_ANEW}))
    return {"cpu_s": sum(cpu_s) / len(cpu_s), "time_s": median(time_s)}, answers


def asked(server: Server, images: Prompt, path: str, **more: Any) -> dict[str, Any]:
    """The server's answer about these images. Raises: httpx.HTTPStatusError."""
    answer = httpx.post(f"{server.url}{PATH}{path}", json=body_of(images, **more), timeout=120)
    said: dict[str, Any] = answer.raise_for_status().json()
    return said


def body_of(images: Prompt, **more: Any) -> dict[str, Any]:
    parts = [image_part(url_of(PNG, number)) for number in images]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
