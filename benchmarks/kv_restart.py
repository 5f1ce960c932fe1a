# SPDX-License-Identifier: Apache-2.0
"""Agents' conversations of 20 screenshots go on after a restart: time to first token, with KV in files and without.

`mmcache` and `stock` keep KV with vLLM's ExampleConnector, `none` is stock without. A server is asked each conversation
once; then another one is started, and asked the same turns, as clients do whose requests were lost. Conversations have
screenshots of their own, so each is one that the second server has not seen. Numbers are medians over conversations.
Seconds of the clock are of a machine that others may use; seconds of CPU, of all processes of the server, are not.
"""

import json
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pictures import Kind, url_of
from benchmarks.processes import server_cpu_s
from benchmarks.results import Result
from benchmarks.servers import ask, image_part, request, zoo_server
from vllm_mmcache.demo.server import Server
from vllm_mmcache.prove.scenarios import filler
from vllm_mmcache.zoo import build_cached

MAX_TOKENS = 16384  # of a prompt, and of a step: ExampleConnector keeps what one step has calculated
MORE = {"max_tokens": 4, "ignore_eos": True, "logprobs": True, "stream_options": {"include_usage": True}}


def measure(options: Namespace) -> Result:
    """All sides; answers that are unlike the first side's are a problem."""
    result = Result()
    bodies = [conversation(options, number) for number in range(options.talks)]
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # /tmp may be RAM
        model = build_cached("qwen3-vl", Path(folder) / "zoo")
        for side in options.sides:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found[side] = after_restart(side, model, Path(place), bodies, options.images)
    result.details = {"body_bytes": len(bodies[0]), **found}
    for what in ("first_token_s", "cpu_s", "prompt_tokens", "cached_tokens"):
        result.add("restart", what, {side: median(one[what] for one in asked) for side, asked in found.items()})
    answers = [[one["answer"] for one in asked] for asked in found.values()]
    if any(one != answers[0] for one in answers):
        result.problems.append("the answers differ")
    return result


def conversation(options: Namespace, number: int) -> bytes:
    """A request: what is to be done, then a screenshot of each step and the click that followed."""
    kind = Kind("image/png", (options.width, options.height), 20, {"format": "PNG", "compress_level": 6})
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You use computer {number}." + filler(300, number)}
    ]
    for step in range(options.images):
        said = {"type": "text", "text": f"Step {step}." + filler(10, step)}
        messages.append({"role": "user", "content": [said, image_part(url_of(kind, 100 * number + step))]})
        if step + 1 < options.images:
            messages.append({"role": "assistant", "content": f"Click at {step}." + filler(20, step)})
    return json.dumps(request(messages, **MORE)).encode()


def after_restart(side: str, model: Path, place: Path, bodies: list[bytes], images: int) -> list[dict[str, Any]]:
    """One side: a server that fills, where anything is kept, and one that is measured. Units: seconds."""
    args = ["--max-model-len", str(MAX_TOKENS), "--max-num-batched-tokens", str(MAX_TOKENS)]
    args += ["--enable-prompt-tokens-details"]
    env = {"MMCACHE_STORE": str(place / "store")} if side == "mmcache" else {}
    if side != "none":
        (place / "kv").mkdir()
        extra = {"shared_storage_path": str(place / "kv")}
        transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        args += ["--kv-transfer-config", json.dumps(transfer)]
    found: list[dict[str, Any]] = []
    running = "mmcache" if side == "mmcache" else "stock"
    for _ in range(1 if side == "none" else 2):
        with zoo_server(model, running, images=images, args=args, env=env) as server:
            found = [cost_of(server, body) for body in bodies]
    return found


def cost_of(server: Server, body: bytes) -> dict[str, Any]:
    """One answer, and the CPU seconds of all processes of the server meanwhile."""
    before = sum(server_cpu_s(server).values())
    reply = ask(server.url, [body])
    cpu_s = sum(server_cpu_s(server).values()) - before
    numbers = {"prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens, "cpu_s": cpu_s}
    return {"first_token_s": reply.first_token_s, **numbers, "answer": [token for token, _ in reply.answer]}
