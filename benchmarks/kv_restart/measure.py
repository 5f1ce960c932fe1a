# SPDX-License-Identifier: Apache-2.0
"""Agents' conversations of 20 screenshots go on after a restart: time to first token, with KV in files and without.

python -m benchmarks.kv_restart.measure [--images 20] [--talks 3] [--sides mmcache stock none] [--save]

`mmcache` and `stock` keep KV with vLLM's ExampleConnector, `none` is stock without. A server is asked each conversation
once; then another one is started, and asked the same turns, as clients do whose requests were lost. Conversations have
screenshots of their own, so each is one that the second server has not seen. Numbers are medians over conversations.
Seconds of the clock are of a machine that others may use; seconds of CPU, of all processes of the server, are not.
"""

import argparse
import http.client
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import result_options, save_result
from benchmarks.processes import server_cpu_s
from benchmarks.servers import MODEL, zoo_server
from benchmarks.warm_turn.pictures import Kind, data_url, picture
from benchmarks.warm_turn.turns import PATH, TIMEOUT_S
from vllm_mmcache.demo.server import Server
from vllm_mmcache.prove.scenarios import filler
from vllm_mmcache.zoo import build_cached

SIDES = ("mmcache", "stock", "none")
MAX_TOKENS = 16384  # of a prompt, and of a step: ExampleConnector keeps what one step has calculated


def main() -> None:
    """Measure, print, and write the result with --save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_restart.measure", description=__doc__)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--height", type=int, default=640)
    parser.add_argument("--talks", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    options = result_options(parser).parse_args()
    bodies = [json.dumps(request(options, talk)).encode() for talk in range(options.talks)]
    result: dict[str, Any] = {"body_bytes": len(bodies[0])}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # /tmp may be RAM
        model = build_cached("qwen3-vl", Path(folder) / "zoo")
        for side in options.sides:
            place = Path(folder) / side
            place.mkdir()
            result[side] = measure(side, model, place, bodies, options)
            shutil.rmtree(place)
            print(side, json.dumps(result[side]), flush=True)
    first = result[options.sides[0]]["answers"]
    result["equal"] = all(result[side]["answers"] == first for side in options.sides)
    for side in options.sides if "none" in options.sides else ():
        for unit in ("s", "cpu_s"):
            result[side][f"ratio_{unit}"] = round(
                result[side][f"restart_{unit}"] / result["none"][f"restart_{unit}"], 3
            )
        print(side, {name: value for name, value in result[side].items() if name.startswith("ratio")})
    print("answers are equal:", result["equal"])
    save_result(__file__, options, result)


def request(options: argparse.Namespace, talk: int) -> dict[str, Any]:
    """The conversation: what is to be done, then a screenshot of each step and the click that followed."""
    kind = Kind("image/png", (options.width, options.height), 20, {"format": "PNG", "compress_level": 6})
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You use computer {talk}." + filler(300, talk)}]
    for step in range(options.images):
        screen = {"type": "image_url", "image_url": {"url": data_url(kind, picture(kind, 100 * talk + step))}}
        said = {"type": "text", "text": f"Step {step}." + filler(10, step)}
        messages.append({"role": "user", "content": [said, screen]})
        if step + 1 < options.images:
            messages.append({"role": "assistant", "content": f"Click at {step}." + filler(20, step)})
    more = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": MODEL, "messages": messages, **more, **stream}


def measure(side: str, model: Path, place: Path, bodies: list[bytes], options: argparse.Namespace) -> dict[str, Any]:
    """One side: a server that fills, where anything is kept, and one that is measured. Units: seconds."""
    args = ["--max-model-len", str(MAX_TOKENS), "--max-num-batched-tokens", str(MAX_TOKENS)]
    args += ["--enable-prompt-tokens-details"]
    env = {"MMCACHE_STORE": str(place / "store")} if side == "mmcache" else {}
    if side != "none":
        extra = {"shared_storage_path": str(place / "kv")}
        (place / "kv").mkdir()
        transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        args += ["--kv-transfer-config", json.dumps(transfer)]
    running = "mmcache" if side == "mmcache" else "stock"
    for _ in range(1 if side == "none" else 2):
        with zoo_server(model, running, images=options.images, args=args, env=env) as server:
            found = [ask(server, body) for body in bodies]
    return {
        "prompt_tokens": [one["prompt_tokens"] for one in found],
        "cached_tokens": [one["cached_tokens"] for one in found],
        "restart_s": round(statistics.median(one["seconds"] for one in found), 3),
        "restart_cpu_s": round(statistics.median(one["cpu_s"] for one in found), 3),
        "each_s": [round(one["seconds"], 3) for one in found],
        "each_cpu_s": [round(one["cpu_s"], 3) for one in found],
        "answers": [one["answer"] for one in found],
    }


def ask(server: Server, body: bytes) -> dict[str, Any]:
    """Seconds from the first byte sent to the first token back, its answer and what of the prompt was cached."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=TIMEOUT_S)
    connection.connect()
    before = sum(server_cpu_s(server).values())
    start = time.perf_counter()
    connection.request("POST", PATH, body=body, headers={"content-type": "application/json"})
    answer = connection.getresponse()
    seconds, tokens, usage = 0.0, [], {}
    for line in answer:
        if not line.startswith(b"data: {"):
            if line.strip() and not line.startswith(b"data: [DONE]"):
                raise RuntimeError(f"answered {answer.status}: {line[:500]!r}")
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            found = [entry["token"] for entry in ((choice.get("logprobs") or {}).get("content") or ())]
            if found and not tokens:
                seconds = time.perf_counter() - start
            tokens += found
        usage = event.get("usage") or usage
    connection.close()
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {
        "seconds": seconds,
        "cpu_s": sum(server_cpu_s(server).values()) - before,
        "answer": tokens,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": cached,
    }


if __name__ == "__main__":
    main()
