# SPDX-License-Identifier: Apache-2.0
"""What identity costs: per image in the processor's thread, and in conversations that name their images by uuid alone.

python -m benchmarks.identity.run [--rounds 2000] [--images 20] [--turns 40] [--swaps 2] [--micro] [--save]

Targets: at most 50 microseconds an image, warm, at a payload of 1 MB, beyond the digest; uuid-only turns within 5 % of
stock's. Real servers, in turn.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.identity import cost
from benchmarks.machine import result_options, save_result
from benchmarks.servers import zoo_server
from benchmarks.sides import SIDES, compare
from benchmarks.warm_turn.pictures import SMALL, data_url, picture
from benchmarks.warm_turn.turns import first_token_s, image_part, talk
from vllm_mmcache.zoo import build_cached

PAYLOAD_BYTES = 1 << 20
TARGET_S = 50e-6
NUM_WARM_UPS = 5


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.identity.run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--images", type=int, default=20, help="images of a conversation")
    parser.add_argument("--turns", type=int, default=40, help="uuid-only turns of a server")
    parser.add_argument("--swaps", type=int, default=2, help="servers of each side, in turn")
    parser.add_argument("--micro", action="store_true", help="without servers")
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    result: dict[str, Any] = {"target_s": TARGET_S, "cost": cost.measure(PAYLOAD_BYTES, options.rounds)}
    for name, row in result["cost"].items():
        print(
            f"{name:26} {row['warm_s'] * 1e6:6.1f} us warm (vLLM's digest alone {row['digest_s'] * 1e6:.0f} us)",
            flush=True,
        )
    if not options.micro:
        result["uuid_only_turn"] = conversations(options)
    save_result(__file__, options, result)


def conversations(options: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first token of a turn whose images are named by uuid alone, all of it cached."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached("qwen3-vl", Path(folder))
        for number in range(options.swaps):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                with zoo_server(model, side, images=options.images) as server:
                    seconds[side] += turns(server.url, options)
    print(*(f"{side}: median {median(found) * 1e3:.2f} ms" for side, found in seconds.items()), flush=True)
    return compare("uuid-only turn", seconds)


def turns(url: str, options: argparse.Namespace) -> list[float]:
    """Seconds of each turn after the first, which carries the images."""
    names = [f"conversation-{number}" for number in range(options.images)]
    urls = [data_url(SMALL, picture(SMALL, number)) for number in range(options.images)]
    whole = talk([image_part(one, name) for one, name in zip(urls, names, strict=True)])
    alone = talk([image_part(None, name) for name in names])
    first_token_s(url, whole.body("What are these?"))
    found = [first_token_s(url, alone.body(f"Question {number}?")) for number in range(NUM_WARM_UPS + options.turns)]
    return found[NUM_WARM_UPS:]


if __name__ == "__main__":
    main()
