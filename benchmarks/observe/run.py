# SPDX-License-Identifier: Apache-2.0
"""What recording costs a warm turn about 20 images: turns with and without it, and the wrappers' own time, both sides.

python -m benchmarks.observe.run [--images 20] [--turns 30] [--pairs 600] [--save]

Targets: at most 200 microseconds a request, and 1 % of its time.
"""

import argparse

from benchmarks.machine import result_options, save_result
from benchmarks.sides import run_worker


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe.run", description=__doc__)
    parser.add_argument("--images", type=int, default=20, help="images of the conversation")
    parser.add_argument("--turns", type=int, default=30, help="turns whose parts are timed")
    parser.add_argument("--pairs", type=int, default=600, help="turns with recording, and as many without")
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    task = {"kind": "warm_turns", "images": options.images, "turns": options.turns}
    parts = run_worker("benchmarks.observe.worker", "mmcache", task)
    for name, value in parts.items():
        print(f"{name}: {1e6 * value:.0f} us", flush=True)
    task = {"kind": "alternate", "images": options.images, "turns": options.pairs}
    turn = run_worker("benchmarks.observe.worker", "mmcache", task)
    cost = turn["recorded"] - turn["plain"]
    print(
        f"a turn of {1e3 * turn['plain']:.1f} ms: {1e6 * cost:.0f} us more, {cost / turn['plain']:.3f} of it",
        flush=True,
    )
    save_result(__file__, options, {"seconds": parts, "turn": turn})


if __name__ == "__main__":
    main()
