# SPDX-License-Identifier: Apache-2.0
"""Seconds of identity work per image in the processor's thread, in this process: no engine, no server.

The image is warm: its bytes are known, so that their digest is remembered, as on every turn but the first. What is left
is what this room adds: alias, tenant and arguments.
"""

import time
from statistics import median
from typing import Any

from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from benchmarks.warm_turn.pictures import PNG, picture
from vllm_mmcache import tenant
from vllm_mmcache.upstream import hooks, vllm_version
from vllm_mmcache.upstream.ledger import groups

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "uuid": {"uuid": "conversation-17-image"},
    "salt": {"salt": "a salt of forty-three characters, as advised"},
    "uuid and salt": {"uuid": "conversation-17-image", "salt": "a salt of forty-three characters, as advised"},
    "uuid, salt and arguments": {
        "uuid": "conversation-17-image",
        "salt": "a salt of forty-three characters, as advised",
        "arguments": {"max_pixels": 602112, "min_pixels": 3136},
    },
}


def measure(payload_bytes: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Case -> median seconds per image of vLLM's digest (without the room and its memory), and of the warm room."""
    content = picture(PNG, 0)
    content += b"\0" * (payload_bytes - len(content))  # behind the end of a PNG: bytes, not pixels
    found: dict[str, dict[str, float]] = {}
    stock = {name: _seconds(content, num_rounds, **case) for name, case in CASES.items() if name == "plain"}
    for group in ("lazy_media", "identity"):
        outcome = hooks.install(group, groups()[group], vllm_version())
        assert outcome.state == "on", outcome.reason
    try:
        for name, case in CASES.items():
            found[name] = {"digest_s": stock["plain"], "warm_s": _seconds(content, num_rounds, **case)}
    finally:
        hooks.undo("identity")
        hooks.undo("lazy_media")
    return found


def _seconds(content: bytes, num_rounds: int, uuid: str = "", salt: str = "", arguments: Any = None) -> float:
    """Median seconds from a parsed item to its mm_hash."""
    before = tenant.SALT.set(salt or None)
    try:
        loader = ImageMediaIO()
        loader.load_bytes(content)
        items = MultiModalDataParser().parse_mm_data({"image": [loader.load_bytes(content)]})
        seconds = []
        for _ in range(num_rounds):
            start = time.perf_counter()
            names = {"image": [uuid]} if uuid else None
            ProcessorInputs([], items, names, arguments or {}).get_mm_hashes("zoo", "blake3")
            seconds.append(time.perf_counter() - start)
        return median(seconds[num_rounds // 10 :])
    finally:
        tenant.SALT.reset(before)
