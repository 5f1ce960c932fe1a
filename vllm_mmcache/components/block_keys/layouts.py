# SPDX-License-Identifier: Apache-2.0
"""Which layout of block keys is used under a hash algorithm, and why. Any process."""

CUMULATIVE = "cumulative"
STOCK = "stock"

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def layout_report(algo: str, *, enabled: bool = True, num_lookahead_tokens: int = 0) -> tuple[str, str]:
    """Which key layout is used under --prefix-caching-hash-algo `algo`, and why: ("cumulative" or "stock", reason)."""
    if not enabled:
        return STOCK, "switched off by the setting block_keys"
    if algo.endswith("_cbor"):
        return STOCK, "chosen so that others can recompute keys; chaining makes stock's cumulative already"
    if num_lookahead_tokens:
        return STOCK, f"keys cover {num_lookahead_tokens} tokens that a drafter looks ahead"
    if algo == "sha256":
        return CUMULATIVE, "SHA-256, the same keys in every replica"
    if algo == "xxhash":
        return CUMULATIVE, "XXH3-128 below a secret seed of this process, unless PYTHONHASHSEED is set"
    return STOCK, f"hash algorithm {algo} is not one we know"
