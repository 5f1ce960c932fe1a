# SPDX-License-Identifier: Apache-2.0
"""What a KV connector of a configuration can't do here, for `mmcache doctor`: docs/composes.md.

Asks vLLM's configuration, and imports none of vLLM.
"""

import os
from typing import Any

EXAMPLE = "ExampleConnector"
NOT_ON_THE_CPU = ("OffloadingConnector", "SimpleCPUOffloadConnector")
LMCACHE, LMCACHE_MP = "LMCacheConnectorV1", "LMCacheMPConnector"
NOT_BY_BLOCK_KEYS = (EXAMPLE, LMCACHE, LMCACHE_MP)
"""Connectors that find KV by a hash of their own."""
SEED = "PYTHONHASHSEED"
OPTION = "--kv-transfer-config"


def findings(config: Any, platform: str | None, is_identity_on: bool) -> list[dict[str, str]]:
    """Each with where it is, what is seen, and its cure. None without a KV connector."""
    transfer = config.kv_transfer_config if config is not None else None
    if transfer is None or transfer.kv_connector is None:
        return []
    found = []
    for name in NOT_ON_THE_CPU if platform == "cpu" else ():
        if transfer.has_connector(name):
            seen = f"{name}: vLLM runs it on GPUs alone, and this is the CPU: no engine starts"
            found.append(_finding(seen, f"on the CPU: {EXAMPLE}, for one tenant"))
    if transfer.has_connector(EXAMPLE):
        seen = f"the files of {EXAMPLE} know no cache_salt: tenants find each other's texts (not images)"
        found.append(_finding(seen, "take it where there is one tenant; it is vLLM's example"))
    if config.model_config.multimodal_config is not None and (why := _of_lmcache(transfer)):
        found.append(_finding(f"{why} (read in vLLM 0.32, not run)", "a connector that finds by block keys"))
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    by_keys = transfer.kv_connector not in NOT_BY_BLOCK_KEYS
    if by_keys and algorithm.startswith("xxhash") and SEED not in os.environ:
        seen = f"{algorithm} without {SEED}: block keys are of this process alone, so after a restart nothing is found"
        found.append(_finding(seen, f"--prefix-caching-hash-algo sha256, or one secret {SEED} for all servers"))
    if not is_identity_on:
        seen = "identity will not be on: a client's uuid is the name of an image's KV, whatever it shows"
        found.append(_finding(seen, "switch identity on, or let no client send uuids"))
    return found


def _of_lmcache(transfer: Any) -> str:
    """What its names say too little of. tests/unit/cli/test_connectors.py looks whether vLLM still has it so."""
    if transfer.has_connector(LMCACHE_MP):
        return (
            f"{LMCACHE_MP} finds KV by token ids alone, which are the same for all pictures of one size: wrong answers"
        )
    if transfer.has_connector(LMCACHE) and transfer.get_from_extra_config("use_native", False):
        return f"{LMCACHE} with use_native knows a picture by 16 bits of its name: now and then another one's KV"
    return ""


def _finding(seen: str, cure: str) -> dict[str, str]:
    return {"where": OPTION, "seen": seen, "cure": cure}
