# SPDX-License-Identifier: Apache-2.0
"""Time to hash one long prompt with images: vLLM's block hasher and ours in turn, in one process.

Target: ours takes at most 0.7 of stock's time under sha256.
"""

from argparse import Namespace
from functools import partial

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

from benchmarks.results import Result, medians
from tests.support.vllm_requests import Prompt, make_request, our_hasher, stock_hasher


def measure(options: Namespace) -> Result:
    """Both algorithms."""
    result, gap = Result(), options.tokens // options.images
    images = tuple((f"{k:064x}", k * gap + 7, gap * 3 // 4) for k in range(options.images))
    prompt = Prompt(tuple(i % 150_000 for i in range(options.tokens)), images)
    for algorithm in ("sha256", "xxhash"):
        function = hashing.get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(function)
        made = {"stock": stock_hasher, "mmcache": our_hasher}
        hashers = {side: make(options.block_size, function) for side, make in made.items()}
        for hasher in hashers.values():
            assert len(hasher(make_request(prompt, lambda _: []))) == options.tokens // options.block_size
        work = {side: lambda hasher=hasher: partial(hasher, make_request(prompt, lambda _: []))
                for side, hasher in hashers.items()}  # fmt: skip
        result.add(algorithm, "time_s", medians(work, options.rounds))
    return result
