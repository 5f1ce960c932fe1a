# SPDX-License-Identifier: Apache-2.0
"""An agent's conversation of 20 screenshots goes on after a restart: time to first token, with KV in files and without.

python -m benchmarks.kv_restart.measure [--images 20] [--restarts 3] [--sides mmcache stock none] [--save]

`mmcache` and `stock` keep KV with vLLM's ExampleConnector, `none` is stock without. Each side is asked the whole
conversation once; then its server is started anew as often as --restarts says, and each time asked the same turn, as a
client does whose request was lost. Times are medians over the restarts, of one request each, which is the first one.
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
from benchmarks.servers import MODEL, zoo_server
from benchmarks.warm_turn.pictures import Kind, data_url, picture
from benchmarks.warm_turn.turns import PATH, TIMEOUT_S
from vllm_mmcache.demo.server import Server
from vllm_mmcache.prove.scenarios import filler
from vllm_mmcache.zoo import build_cached

SIDES = ("mmcache", "stock", "none")
MAX_TOKENS = 32768  # of a prompt, and of a step: ExampleConnector keeps what one step has calculated


def main() -> None:
    """Measure, print, and write the result with --save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_restart.measure", description=__doc__)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    options = result_options(parser).parse_args()
    body = json.dumps(request(options)).encode()
    result: dict[str, Any] = {"body_bytes": len(body)}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # /tmp may be RAM
        model = build_cached("qwen3-vl", Path(folder) / "zoo")
        for side in options.sides:
            place = Path(folder) / side
            place.mkdir()
            result[side] = measure(side, model, place, body, options)
            shutil.rmtree(place)
            print(side, json.dumps(result[side]), flush=True)
    answers = {tuple(answer) for side in options.sides for answer in result[side]["answers"]}
    result["equal"] = len(answers) == 1
    if "none" in options.sides:
        for side in options.sides:
            result[side]["ratio"] = round(result[side]["restart_s"] / result["none"]["restart_s"], 3)
    save_result(__file__, options, result)
    print(json.dumps(result["equal"]), {side: result[side].get("ratio") for side in options.sides})


def request(options: argparse.Namespace) -> dict[str, Any]:
    """The conversation: what is to be done, then a screenshot of each step and the click that followed."""
    kind = Kind("image/png", (options.width, options.height), 20, {"format": "PNG", "compress_level": 6})
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You use a computer." + filler(300)}]
    for step in range(options.images):
        screen = {"type": "image_url", "image_url": {"url": data_url(kind, picture(kind, step))}}
        said = {"type": "text", "text": f"Step {step}." + filler(10, step)}
        messages.append({"role": "user", "content": [said, screen]})
        if step + 1 < options.images:
            messages.append({"role": "assistant", "content": f"Click at {step}." + filler(20, step)})
    more = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": MODEL, "messages": messages, **more, **stream}


def measure(side: str, model: Path, place: Path, body: bytes, options: argparse.Namespace) -> dict[str, Any]:
    """One side: filled once, started anew, asked once each time. Units: seconds."""
    args = ["--max-model-len", str(MAX_TOKENS), "--max-num-batched-tokens", str(MAX_TOKENS)]
    args += ["--enable-prompt-tokens-details"]
    env = {"MMCACHE_STORE": str(place / "store")} if side == "mmcache" else {}
    if side != "none":
        extra = {"shared_storage_path": str(place / "kv")}
        (place / "kv").mkdir()
        transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        args += ["--kv-transfer-config", json.dumps(transfer)]
    seconds, cached, answers = [], [], []
    for _ in range(1 + options.restarts):
        running = "mmcache" if side == "mmcache" else "stock"
        with zoo_server(model, running, images=options.images, args=args, env=env) as server:
            found = ask(server, body)
        seconds.append(round(found["seconds"], 3))
        cached.append(found["cached_tokens"])
        answers.append(found["answer"])
    return {
        "prompt_tokens": found["prompt_tokens"],
        "cold_s": seconds[0],
        "restart_s": statistics.median(seconds[1:]),
        "restarts_s": seconds[1:],
        "cached_tokens": cached,
        "answers": answers,
    }


def ask(server: Server, body: bytes) -> dict[str, Any]:
    """Seconds from the first byte sent to the first token back, its answer and what of the prompt was cached."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=TIMEOUT_S)
    connection.connect()
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
            found = [entry["token"] for entry in (choice.get("logprobs") or {}).get("content", ())]
            if found and not tokens:
                seconds = time.perf_counter() - start
            tokens += found
        usage = event.get("usage") or usage
    connection.close()
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {
        "seconds": seconds,
        "answer": tokens,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": cached,
    }


if __name__ == "__main__":
    main()
