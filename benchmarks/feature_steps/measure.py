# SPDX-License-Identifier: Apache-2.0
"""What the feature store costs an engine's steps: its own time in each, and the decoding of others while it loads.

python -m benchmarks.feature_steps.measure [--engines v1 v2-async | default] [--rounds 5] [--packages 20] [--save]

Decoding: the time of every step of four requests, without loads and while 20 packages of 64 MiB come from the disk
(out of the page cache), or from a Valkey behind a proxy that lets 100 MB/s through. The control is a thread that reads
the same files and does nothing with them.
"""

import argparse
import os
import tempfile
from typing import Any

from benchmarks.feature_steps.slow import SlowProxy
from benchmarks.machine import result_options, save_result
from benchmarks.sides import run_worker
from tests.engine_configuration import CONFIGURATIONS
from tests.features.conftest import Server, server_binary
from vllm_mmcache.zoo import FAMILIES

WORKER = "benchmarks.feature_steps.worker"
A_CORE_TO_SPARE = {"OMP_NUM_THREADS": "1"}  # for the engine to decode on one of two, as a GPU leaves cores


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feature_steps.measure", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["v1", "v2-async"], choices=[*CONFIGURATIONS, "default"])
    parser.add_argument("--family", default="qwen3-vl", choices=FAMILIES)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=448, help="pixels of an image's side")
    parser.add_argument("--packages", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=100e6, help="bytes a second through the proxy")
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    result: dict[str, Any] = {"steps": {}}
    for engine in options.engines:
        task = {"kind": "steps", "images": options.images, "rounds": options.rounds, "size": options.size}
        environ = CONFIGURATIONS[engine].environment() if engine in CONFIGURATIONS else {}
        found = run_worker(WORKER, "mmcache", {"family": options.family, **task}, environ)
        result["steps"][engine] = found
        for which, spread in found.items():
            print(f"{engine} steps, {which}: median {spread['median_ms']:.3f} ms, p99 {spread['p99_ms']:.3f} ms")
    result["decoding"] = decoding(options)
    save_result(__file__, options, result)


def decoding(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of requests that decode, with what vLLM takes, here runner V1, whose steps are short; by tier."""
    task = {"kind": "decoding", "family": options.family, "packages": options.packages, "repeats": options.repeats}
    found = {}
    with tempfile.TemporaryDirectory() as place:
        found["disk"] = run_worker(WORKER, "mmcache", {**task, "settings": {"store": place}}, A_CORE_TO_SPARE)
    if (binary := server_binary()) is not None:
        server = Server(binary)
        server.start()
        os.setpriority(os.PRIO_PROCESS, server.pid, 19)  # it stands for another machine
        try:
            with SlowProxy(server.port, options.bandwidth) as proxy:
                store = {"store": f"redis://127.0.0.1:{proxy.port}", "store_remote_timeout_s": 2}
                found["valkey"] = run_worker(WORKER, "mmcache", {**task, "settings": store}, A_CORE_TO_SPARE)
        finally:
            server.kill()
    for tier, one in found.items():
        print(
            f"decoding, {options.packages} packages from {tier} in {min(one['load_s']):.1f} s: p99 of a step "
            f"{one['without']['p99_ms']:.2f} -> {one['loading']['p99_ms']:.2f} ms, ratio {one['ratio_p99']:.2f}"
            + (f"; beside plain reads of the same {one['reading']['p99_ms']:.2f} ms" if "reading" in one else "")
        )
    return found


if __name__ == "__main__":
    main()
