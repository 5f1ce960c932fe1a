# SPDX-License-Identifier: Apache-2.0
"""Every benchmark: what it asks, its options, and those that make it short.

What it does lies in the module of its name, but for those in replays.py, which are requests to an engine and no more,
and those in server_scenarios.py, which are requests to a server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIDES = ("stock", "mmcache")
WITH_TOWERS = ("qwen3-vl", "qwen3.5", "qwen3-vl-moe", "gemma4")  # of a large picture the tower is most of the time


API = "measures the API server, which has no CUDA part"
CPU = "its server is one of the CPU"
STORE = "measures disk, Valkey and threads; what depends on the platform is in gallery"


@dataclass(frozen=True)
class Benchmark:
    """`short` are the options that differ in the short form. `not_on_gpu`: why `make gpu-check` leaves it out."""

    what: str
    options: Mapping[str, Any]
    short: Mapping[str, Any]
    not_on_gpu: str = ""
    in_bench: bool = True  # `make bench` runs it unless others are named


BENCHMARKS: dict[str, Benchmark] = {
    "block_keys": Benchmark(
        "time to hash one long prompt with images: vLLM's block hasher and ours in turn, in one process",
        {"tokens": 131_072, "images": 100, "block_size": 16, "rounds": 21},
        {"rounds": 9},
    ),
    "gemma3_attention": Benchmark(
        "Gemma 3 on the CPU: exactness, images split under load, the endless request, CPU time of a prefill",
        {"windows": (128, 512, 1024), "steps": 2000, "rounds": 15, "repeats": 8},
        {"windows": (128,), "steps": 100, "rounds": 5, "repeats": 1},
        not_on_gpu="measures the plugin's attention for vLLM's CPU backend; other platforms keep vLLM's own",
    ),
    "image_questions": Benchmark(
        "the second question about an image: cached tokens by the best possible",
        {"families": ("gemma3", "qwen3.5"), "unique": 200, "repeats": 1},
        {"families": ("gemma3",), "unique": 0},
    ),
    "cold_requests": Benchmark(
        "what the first request about images costs, nothing of it cached; then a room on and off in one process",
        {"families": ("gemma3", "qwen3.5", "qwen3-vl"), "rounds": 5, "repeats": 4, "pairs": 5},
        {"families": ("gemma3", "qwen3.5"), "rounds": 3, "repeats": 1, "pairs": 4},
        in_bench=False,
    ),
    "agents": Benchmark(
        "agents and pipelines: tokens reused of the best possible, runs of the vision tower, time of a request",
        {"families": ("qwen3-vl", "qwen3.5", "gemma3"), "photos": 200, "repeats": 1},
        {"families": ("qwen3.5",)},
    ),
    "computer_use": Benchmark(
        "computer use in the shape of H CUA Perf: 38 steps, the last 1, 3 or 5 screenshots live, older ones a line",
        {"families": ("qwen3-vl", "qwen3.5"), "steps": 38, "windows": (1, 3, 5), "repeats": 1},
        {"families": ("qwen3.5",), "steps": 12},
    ),
    "image_service": Benchmark(
        "a mixed image service in the shape of ServeGen: 80 % of requests have one image, p99 nine, 540 tokens each",
        {"families": ("qwen3-vl", "qwen3.5"), "requests": 100, "repeats": 1},
        {"families": ("qwen3.5",), "requests": 20},
    ),
    "random_mm": Benchmark(
        "vLLM's own `bench serve` with random-mm as the client, the same seed twice",
        {"family": "qwen3-vl", "requests": 50, "images": 2, "side": 672, "words": 128, "at_once": 4},
        {"requests": 10},
        CPU,
    ),
    "warm_turn": Benchmark(
        "a warm turn about 20 images: time to first token, CPU of the API server, turns per second",
        {"images": 20, "turns": 20, "conversations": 8, "turns_at_once": 5, "cold": 5},
        {"images": 10, "turns": 5, "turns_at_once": 2, "cold": 2},
        API,
    ),
    "gallery": Benchmark(
        "images in rotation: time of a question and runs of the tower from the second round on; what saving costs",
        {"families": WITH_TOWERS, "images": 20, "size": 1024, "repeats": 2},
        {"families": ("qwen3-vl",), "images": 10, "repeats": 1},
    ),
    "restart": Benchmark(
        "the first question about each known image after a restart, features on disk or in Valkey",
        {"families": WITH_TOWERS, "tiers": ("disk", "valkey"), "images": 20, "size": 1024, "repeats": 2},
        {"families": ("qwen3-vl",), "tiers": ("disk",), "images": 10, "repeats": 1},
        STORE,
    ),
    "kv_restart": Benchmark(
        "conversations of 20 screenshots go on after a restart, their KV in vLLM's ExampleConnector and without",
        {"images": 20, "width": 1024, "height": 640, "talks": 3, "sides": ("mmcache", "stock", "none")},
        {"images": 6, "talks": 2},
        CPU, in_bench=False,
    ),
    "upstream_connectors": Benchmark(
        "the feature store beside vLLM's own encoder-cache connectors: rotation, restart, two faults; runner V2",
        {"sides": ("stock", "ECCPUConnector", "ECExampleConnector", "mmcache"), "images": 5, "size": 512},
        {"sides": ("stock", "mmcache")},
        not_on_gpu="supplies what vLLM's CPU build lacks",
        in_bench=False,
    ),
    "feature_steps": Benchmark(
        "what the feature store takes in an engine's step, and what its loads do to others' decoding",
        {"engines": ("v1", "v2-async"), "family": "qwen3-vl", "images": 20, "rounds": 5, "size": 448, "packages": 20,
         "repeats": 3, "bandwidth": 100e6},
        {"engines": ("v1",), "images": 6, "rounds": 2, "packages": 4, "repeats": 1},
        STORE, in_bench=False,
    ),
    "identity": Benchmark(
        "identity work per image in this process, and turns of conversations that name images by uuid alone",
        {"rounds": 2000, "images": 20, "turns": 40, "swaps": 2},
        {"rounds": 500, "turns": 20, "swaps": 1},
        API,
    ),
    "observe": Benchmark(
        "what recording costs a warm turn about 20 images",
        {"images": 20, "pairs": 600},
        {"pairs": 60},
        API,
    ),
    "sealing": Benchmark(
        "what encryption at rest costs a load and a save of features, and a record: processor time",
        {"mebibytes": 64, "rounds": 15},
        {"rounds": 3},
        STORE, in_bench=False,
    ),
    "load": Benchmark(
        "16 conversations with screenshots at once for minutes: failures, rate, times, memory",
        {"seconds": 300.0, "conversations": 16, "family": "qwen3-vl", "sides": SIDES},
        {"seconds": 15.0},
        CPU,
    ),
    "memory": Benchmark(
        "memory of each process while a server sees thousands of distinct images",
        {"distinct": 2000, "images": 20, "size": 320, "family": "qwen3-vl", "sides": SIDES},
        {"distinct": 200},
        CPU, in_bench=False,
    ),
    "chaos": Benchmark(
        "a server under load whose directory and Valkey are damaged and taken away, and which is killed 20 times",
        {"faults": (), "kills": 20, "seconds": 6.0, "clients": 8, "pictures": 40, "sides": SIDES},
        {"faults": ("nothing", "files truncated", "Valkey killed"), "kills": 2, "pictures": 24, "sides": ("mmcache",)},
        CPU, in_bench=False,
    ),
    "feature_costs": Benchmark(
        "bandwidths of this machine, the real tower of Qwen3-VL-8B on the CPU, compression: for the cost model",
        {"mebibytes": 64, "rounds": 5, "pictures": ("512", "720p", "1080p"), "layers": 27},
        {"mebibytes": 16, "rounds": 1, "pictures": ("512",), "layers": 1},
        STORE, in_bench=False,
    ),
    "processor": Benchmark(
        "what an image costs before the model sees it: in rotation, after a restart, by size, many at once; videos",
        {
            "parts": (),  # all
            "images": 400,  # pictures in rotation
            "rounds": 2,  # of the rotation; the first makes them known
            "cache_gib": 0.25,  # of the processor cache that they fall out of: 49 of them
            "restarted": 40,  # pictures asked about after a restart
            "samples": 3,  # pictures of each size, for the table of costs
            "at_once": 32,  # unknown pictures
            "rounds_at_once": 4,  # of them, on each side
            "alone": 8,  # unknown pictures alone, after each of these rounds
            "videos": 4,  # asked about five times each
            "again": False,  # measure also what has a result
        },
        {"images": 14, "cache_gib": 0.03, "restarted": 6, "samples": 1, "at_once": 4, "rounds_at_once": 2, "alone": 2,
         "videos": 1},
        API, in_bench=False,
    ),
    "start_cost": Benchmark(
        "CPU time of API server, engine and worker until the server is healthy, and the plugin's own part of it",
        {"pairs": 5, "plugin": ""},
        {"pairs": 1},
        not_on_gpu="measures what the plugin does before the model runs",
    ),
}  # fmt: skip
