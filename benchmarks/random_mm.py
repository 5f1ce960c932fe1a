# SPDX-License-Identifier: Apache-2.0
"""vLLM's own `vllm bench serve` with random-mm as the client, twice with the same seed, against stock and plugin.

random-mm makes prompts of random words and pictures of random pixels from a seed, so the second run asks what the first
one asked. The first has nothing to reuse: what its best possible would be is left out. The processes of the server
count decodes and runs of the tower (probing.py), alike on both sides.
"""

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import probing
from benchmarks.results import ROOT, Result
from benchmarks.servers import MODEL, PATH, metrics
from benchmarks.sides import SIDES
from vllm_mmcache.zoo import build_cached

VLLM = ROOT / "benchmarks" / "probe" / "vllm_main.py"
SEED = 0
HITS = r"vllm:(prefix_cache_hits)_total"
BLOCK = 32  # tokens, as the benchmarks' servers have them
ARGS = ("--max-model-len", "8192", "--enable-prompt-tokens-details")


def measure(options: Namespace) -> Result:
    """Both sides, a server each, and both runs of the client."""
    result, sides = Result(), dict[str, dict[tuple[str, str], float]]()
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(options.family, Path(folder))
        limits = ("--limit-mm-per-prompt", json.dumps({"image": options.images}))
        for side in SIDES:
            with probing.probed_server(model, side, (*ARGS, *limits)) as up:
                sides[side] = dict(both_runs(up, model, options))
    result.add_sides(sides)
    return result


def both_runs(up: probing.Probed, model: Path, options: Namespace) -> Iterator[tuple[tuple[str, str], float]]:
    """By case and what is counted."""
    for case in ("first run", "same seed again"):
        cached, before = metrics(up.server.url, HITS), probing.read(up.folder)
        said = bench(up.server.url, model, options)
        after = probing.read(up.folder)
        hits = sum(metrics(up.server.url, HITS).values()) - sum(cached.values())
        yield (case, "first_token_s"), said["median_ttft_ms"] / 1000
        yield (case, "requests_per_s"), said["request_throughput"]
        yield (case, "prompt_tokens"), sum(said["input_lens"])
        yield (case, "cached_tokens"), hits
        yield (case, "decodes"), after["decodes"] - before["decodes"]
        yield (case, "tower_runs"), after["tower_runs"] - before["tower_runs"]
        if case != "first run":
            yield (case, "best_tokens"), sum((tokens - 1) // BLOCK * BLOCK for tokens in said["input_lens"])


def bench(url: str, model: Path, options: Namespace) -> dict[str, Any]:
    """What `vllm bench serve` says of one run. Raises: RuntimeError where a request failed, or the command did."""
    sizes = {(options.side, options.side, 1): 1.0}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, str(VLLM), "bench", "serve", "--backend", "openai-chat", "--base-url", url,
            "--endpoint", PATH, "--model", str(model), "--served-model-name", MODEL, "--tokenizer", str(model),
            "--dataset-name", "random-mm", "--seed", str(SEED), "--num-prompts", str(options.requests),
            "--random-input-len", str(options.words), "--random-output-len", "4", "--ignore-eos",
            "--random-mm-base-items-per-request", str(options.images), "--random-mm-num-mm-items-range-ratio", "0",
            "--random-mm-limit-mm-per-prompt", json.dumps({"image": options.images, "video": 0}),
            "--random-mm-bucket-config", str(sizes), "--max-concurrency", str(options.at_once), "--num-warmups", "0",
            "--ready-check-timeout-sec", "0", "--disable-tqdm", "--temperature", "0",
            "--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "said.json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        path = Path(folder) / "said.json"
        said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if done.returncode or said.get("completed") != options.requests:
        raise RuntimeError(f"{said.get('completed', 0)} of {options.requests} requests: {done.stderr[-3000:]}")
    return said
