# SPDX-License-Identifier: Apache-2.0
"""A warm turn about 20 images, stock and plugin: time to first token, API server CPU, turns per second, memory.

python -m benchmarks.warm_turn.run [--turns 20] [--images 20] [--cold 5] [--distinct 2000] [--save]

Real servers, one after the other. The floor is the same turn with ids only (on stock vLLM), plus the time a bare ASGI
app under the same uvicorn takes to receive the same bytes.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import result_options, save_result
from benchmarks.processes import MIB
from benchmarks.servers import zoo_server
from benchmarks.sides import SIDES
from benchmarks.warm_turn.pictures import data_url
from benchmarks.warm_turn.side import CASES, NUM_WARM_UPS, make_pictures, measure, question
from benchmarks.warm_turn.turns import first_token_s, image_part, talk
from vllm_mmcache.demo.server import free_port
from vllm_mmcache.zoo import build_cached
from vllm_mmcache.zoo.configs import ZooOptions

START_TIMEOUT_S = 30
MAX_PIXELS = 768 * 768  # 576 tokens an image, so that 20 of them fit into the 16,384 positions of the model


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_turn.run", description=__doc__)
    parser.add_argument("--images", type=int, default=20, help="images of a conversation")
    parser.add_argument("--turns", type=int, default=20, help="warm turns of a case")
    parser.add_argument("--conversations", type=int, default=8, help="clients at once")
    parser.add_argument("--turns-at-once", type=int, default=5, help="warm turns of each of them")
    parser.add_argument("--cold", type=int, default=5, help="first turns about unknown images")
    parser.add_argument("--distinct", type=int, default=2000, help="distinct images while memory is watched")
    return result_options(parser)


def main() -> None:
    """Measure, print a table, and write the result with --save."""
    options = arguments().parse_args()

    files = make_pictures(options)
    result: dict[str, Any] = {"bare_s": bare(files, options.turns)}
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached("qwen3-vl", Path(folder), options=ZooOptions(max_pixels=MAX_PIXELS))
        for side in SIDES:
            room = {"VLLM_CPU_KVCACHE_SPACE": "2"}
            args = ("--max-model-len", "16384")
            with zoo_server(model, side, images=options.images, args=args, env=room) as server:
                result[side] = measure(server, files, options)
            print(f"{side} measured", flush=True)
    result["targets"] = targets(result)
    for what, value in result["targets"].items():
        print(f"{what:62} {value}", flush=True)
    save_result(__file__, options, result)


def bare(files: dict[str, list[bytes]], num_turns: int) -> dict[str, list[float]]:
    """Seconds that a bare ASGI app takes to receive the body of each case."""
    found = {}
    with bare_server() as url:
        for name, kind in CASES.items():
            conversation = talk([image_part(data_url(kind, content)) for content in files[name]])
            rounds = range(NUM_WARM_UPS + num_turns)
            found[name] = [first_token_s(url, conversation.body(question())) for _ in rounds][NUM_WARM_UPS:]
    return found


@contextlib.contextmanager
def bare_server() -> Iterator[str]:
    """The bare app under uvicorn, with the event loop and HTTP parser that vLLM's server has."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.warm_turn.bare:app", "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "error", "--lifespan", "off"])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                first_token_s(url, [b"{}"])
                break
            except ConnectionError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def targets(result: dict[str, Any]) -> dict[str, Any]:
    """The rows of the table; times are medians."""
    stock, ours = result["stock"], result["mmcache"]
    rows: dict[str, Any] = {}
    for case in CASES:
        times = [median(side[case]["warm_s"]) for side in (stock, ours)]
        floor = median(stock[case]["ids_s"]) + median(result["bare_s"][case])
        rows[f"{case}: body, MB"] = round(ours[case]["body_bytes"] / 1e6, 1)
        rows[f"{case}: time to first token, stock, ms"] = round(times[0] * 1e3, 1)
        rows[f"{case}: time to first token, mmcache, ms"] = round(times[1] * 1e3, 1)
        rows[f"{case}: floor (ids only + bare receive), ms"] = round(floor * 1e3, 1)
        rows[f"{case}: time to first token, mmcache / stock"] = round(times[1] / times[0], 3)
        rows[f"{case}: time to first token, mmcache / floor"] = round(times[1] / floor, 3)
        cpu_s = [side[case]["api_server_cpu_s"] for side in (stock, ours)]
        rows[f"{case}: API server CPU per warm turn, mmcache / stock"] = round(cpu_s[1] / cpu_s[0], 3)
        rows[f"{case}: images decoded on a warm turn, mmcache"] = ours[case]["images_decoded"]
        counted = ours[case]["counters_per_turn"]
        parts = [round(counted[name] * 1e3, 1) for name in ("body_seconds", "media_seconds")]
        rows[f"{case}: of a warm turn of mmcache, ms in (body/, media/)"] = parts
    at_once = [side["at_once"]["turns_per_s"] for side in (stock, ours)]
    rows["at once: warm turns per second, mmcache / stock"] = round(at_once[1] / at_once[0], 3)
    transport_s = [median(ours["transport_s"]), median(stock["transport_s"])]
    warm_s = median(stock["png"]["warm_s"])
    rows["png: client transport and mmcache / stock without it"] = round(transport_s[0] / warm_s, 3)
    rows["png: client transport and stock / stock without it"] = round(transport_s[1] / warm_s, 3)
    rows["cold turn with unknown images, mmcache / stock"] = round(median(ours["cold_s"]) / median(stock["cold_s"]), 3)
    for name, side in (("stock", stock), ("mmcache", ours)):
        sizes = [(images, found["api_server"] / MIB) for images, found in side["memory"]]
        grown = [(images, round(size - sizes[0][1], 1)) for images, size in sizes]
        rows[f"{name}: (distinct images, MiB that the API server has grown)"] = grown
    return rows


if __name__ == "__main__":
    main()
