# SPDX-License-Identifier: Apache-2.0
"""What identity costs: per image in the processor's thread, and in conversations that name their images by uuid alone.

Targets: at most 50 microseconds an image, warm, at a payload of 1 MB, beyond the digest; uuid-only turns within 5 % of
stock's. The image is warm: its bytes are known, so that their digest is remembered, as on every turn but the first.
What is left is what this room adds: alias, tenant and arguments. The turns are those of real servers.
"""

import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from benchmarks.pictures import PNG, SMALL, picture, url_of
from benchmarks.results import Result
from benchmarks.servers import first_token_s, image_part, talk, zoo_server
from benchmarks.sides import SIDES, in_turn
from benchmarks.timing import medians
from vllm_mmcache import tenant
from vllm_mmcache.upstream import hooks, vllm_version
from vllm_mmcache.upstream.ledger import groups
from vllm_mmcache.zoo import build_cached

PAYLOAD_BYTES = 1 << 20
NUM_WARM_UPS = 5
SALT = {"salt": "a salt of forty-three characters, as advised"}
UUID = {"uuid": "conversation-17-image"}
ARGUMENTS = {"arguments": {"max_pixels": 602112, "min_pixels": 3136}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "uuid": UUID, "salt": SALT, "uuid and salt": UUID | SALT,
    "uuid, salt and arguments": UUID | SALT | ARGUMENTS,
}  # fmt: skip


def measure(options: Namespace) -> Result:
    """Case -> median seconds per image of vLLM's digest (without the room and its memory), and of the warm room."""
    result = Result()
    content = picture(PNG, 0)
    content += b"\0" * (PAYLOAD_BYTES - len(content))  # behind the end of a PNG: bytes, not pixels
    stock = per_image_s(content, options.rounds)
    for group in ("lazy_media", "identity"):
        outcome = hooks.install(group, groups()[group], vllm_version())
        assert outcome.state == "on", outcome.reason
    try:
        for case, more in CASES.items():
            result.add(case, "digest_s", {"stock": stock})
            result.add(case, "warm_s", {"mmcache": per_image_s(content, options.rounds, **more)})
    finally:
        hooks.undo("identity")
        hooks.undo("lazy_media")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached("qwen3-vl", Path(folder))
        for side in in_turn(options.swaps):
            with zoo_server(model, side, images=options.images) as server:
                seconds[side] += turns(server.url, options)
    result.add("uuid-only turn", "first_token_s", {side: median(found) for side, found in seconds.items()})
    return result


def per_image_s(content: bytes, num_rounds: int, uuid: str = "", salt: str = "", arguments: Any = None) -> float:
    """Median seconds from a parsed item to its mm_hash."""
    before = tenant.SALT.set(salt or None)
    try:
        loader = ImageMediaIO()
        loader.load_bytes(content)
        items = MultiModalDataParser().parse_mm_data({"image": [loader.load_bytes(content)]})
        names = {"image": [uuid]} if uuid else None

        def digest() -> object:
            return ProcessorInputs([], items, names, arguments or {}).get_mm_hashes("zoo", "blake3")

        warm_up = num_rounds // 10
        return medians({"": lambda: digest}, num_rounds - warm_up, warm_up)[""]
    finally:
        tenant.SALT.reset(before)


def turns(url: str, options: Namespace) -> list[float]:
    """Seconds of each turn after the first, which carries the images; all of it is cached."""
    names = [f"conversation-{number}" for number in range(options.images)]
    whole = talk([image_part(url_of(SMALL, number), name) for number, name in enumerate(names)])
    alone = talk([image_part(None, name) for name in names])
    first_token_s(url, whole.body("What are these?"))
    found = [first_token_s(url, alone.body(f"Question {number}?")) for number in range(NUM_WARM_UPS + options.turns)]
    return found[NUM_WARM_UPS:]
