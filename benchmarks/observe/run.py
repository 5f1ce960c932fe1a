# SPDX-License-Identifier: Apache-2.0
"""What recording costs a warm turn about 20 images: the time of the wrappers alone, API server's side and engine's.

python -m benchmarks.observe.run [--images 20] [--turns 30] [--save]

Targets: at most 200 microseconds a request, and 1 % of its time.
"""

import argparse

from benchmarks.machine import result_options, save_result
from benchmarks.sides import run_worker


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe.run", description=__doc__)
    parser.add_argument("--images", type=int, default=20, help="images of the conversation")
    parser.add_argument("--turns", type=int, default=30)
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    task = {"kind": "warm_turns", "images": options.images, "turns": options.turns}
    seconds = run_worker("benchmarks.observe.worker", "mmcache", task)
    for name, value in seconds.items():
        print(f"{name}: {1e6 * value:.0f} us", flush=True)
    print(f"share of the turn: {seconds['all'] / seconds['turn']:.4f}", flush=True)
    save_result(__file__, options, {"seconds": seconds})


if __name__ == "__main__":
    main()
