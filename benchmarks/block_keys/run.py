# SPDX-License-Identifier: Apache-2.0
"""Time to hash one long prompt with images: vLLM's block hasher and ours in turn, in one process.

    python -m benchmarks.block_keys.run [--tokens 131072] [--images 100] [--block-size 16] [--rounds 21] [--save]

Target: ours takes at most 0.7 of stock's time under sha256.
"""

import argparse
import statistics
import time

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

from benchmarks.machine import result_options, save_result
from tests.block_keys.requests import Prompt, make_request, our_hasher, stock_hasher

TARGET = 0.7


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block_keys.run", description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=21)
    return result_options(parser)


def main() -> None:
    """Measure, print a table, and write the result with --save."""
    options = arguments().parse_args()

    gap = options.tokens // options.images
    images = tuple((f"{k:064x}", k * gap + 7, gap * 3 // 4) for k in range(options.images))
    prompt = Prompt(tuple(i % 150_000 for i in range(options.tokens)), images)
    rows = []
    for algo in ("sha256", "xxhash"):
        function = hashing.get_hash_fn_by_name(algo)
        kv_cache_utils.init_none_hash(function)
        hashers = {
            "stock": stock_hasher(options.block_size, function),
            "mmcache": our_hasher(options.block_size, function),
        }
        times: dict[str, list[float]] = {name: [] for name in hashers}
        for _ in range(options.rounds):
            for name, hasher in hashers.items():
                request = make_request(prompt, lambda _: [])
                start = time.perf_counter()
                keys = hasher(request)
                times[name].append(time.perf_counter() - start)
                assert len(keys) == options.tokens // options.block_size
        stock, ours = (statistics.median(times[name]) * 1e3 for name in ("stock", "mmcache"))
        rows.append({"algo": algo, "stock_ms": round(stock, 2), "mmcache_ms": round(ours, 2), "ratio": ours / stock})
        print(f"{algo:8} stock {stock:7.2f} ms   mmcache {ours:7.2f} ms   ratio {ours / stock:.3f}")
    save_result(__file__, options, {"target_ratio_sha256": TARGET, "rows": rows})


if __name__ == "__main__":
    main()
