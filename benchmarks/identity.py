# SPDX-License-Identifier: Apache-2.0
"""What identity costs: per image in the processor's thread, and in conversations that name their images by uuid alone.

Targets: at most 50 microseconds an image, warm, at a payload of 1 MB, beyond the digest; uuid-only turns within 5 % of
stock's. The image is warm: its bytes are known, so that their digest is remembered, as on every turn but the first.
What is left is what this room adds: alias, tenant and arguments. The turns are those of real servers.
"""

from argparse import Namespace
from typing import Any

from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from benchmarks import scenarios
from benchmarks.pictures import PNG, picture, variant
from benchmarks.results import Result, in_turn, medians
from benchmarks.server_scenarios import uuid_turns
from vllm_mmcache import tenant
from vllm_mmcache.upstream import hooks, vllm_version
from vllm_mmcache.upstream.ledger import groups

PAYLOAD_BYTES = 1 << 20
SALT = {"salt": "a salt of forty-three characters, as advised"}
UUID = {"uuid": "conversation-17-image"}
ARGUMENTS = {"arguments": {"max_pixels": 602112, "min_pixels": 3136}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "uuid": UUID, "salt": SALT, "uuid and salt": UUID | SALT,
    "uuid, salt and arguments": UUID | SALT | ARGUMENTS,
}  # fmt: skip


def measure(options: Namespace) -> Result:
    """Case -> median seconds per image of vLLM's digest (without the room and its memory), and of the warm room."""
    result, content = Result(), picture(PNG, 0)
    content = variant(content, "\0" * (PAYLOAD_BYTES - len(content)))
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
    return scenarios.measure(scenarios.Scenario(uuid_turns), options, in_turn(options.swaps), result)


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
