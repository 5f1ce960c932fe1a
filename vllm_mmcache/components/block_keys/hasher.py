# SPDX-License-Identifier: Apache-2.0
"""Computes the keys of a request's new full blocks, in the layout of `layout.py`. Knows no vLLM import.

Called in the engine process, by the thread that makes and updates requests: once when a request arrives (all blocks
of the prompt) and again as decoding fills blocks. It must never return a key for a block that is not full.
"""

from collections.abc import Callable
from typing import Any

from vllm_mmcache.components.block_keys import layout

_MEMO = "_mmcache_image_states"

PromptEmbedsDigest = Callable[[Any, int, int], bytes]
"""(request, start, end) -> SHA-256 of the prompt embeddings of tokens start to end"""


class BlockHasher:
    """A function from a request to the keys of its blocks that have none yet.

    block_size is in tokens. none_hash is called at each use, since vLLM sets its seed late.
    """

    def __init__(
        self,
        block_size: int,
        digest: layout.Digest,
        none_hash: Callable[[], bytes],
        prompt_embeds_digest: PromptEmbedsDigest,
    ) -> None:
        self.block_size = block_size
        self._digest = digest
        self._none_hash = none_hash
        self._prompt_embeds_digest = prompt_embeds_digest
        self.instead: Callable[[], Callable[[Any], list[bytes]]] | None = None
        """Makes the hasher that would be there without this one."""

    def __call__(self, request: Any) -> list[bytes]:
        """The keys of the full blocks after `request.block_hashes`, in order."""
        size = self.block_size
        first = len(request.block_hashes)
        num_blocks = request.num_tokens // size - first
        if num_blocks <= 0:
            return []
        start = first * size
        tokens = layout.token_bytes(request.all_token_ids[start : start + num_blocks * size])
        parent = request.block_hashes[-1] if first else layout.root_key(self._digest, size, self._none_hash())
        image_extras = self._image_extras(request, start, num_blocks) if request.mm_features else None
        lora = request.lora_request
        lora_extra = layout.lora_extra(lora.lora_name, lora.lora_path) if lora else b""
        salt_extra = layout.salt_extra(request.cache_salt) if start == 0 and request.cache_salt else b""
        has_embeds = request.prompt_embeds is not None

        digest = self._digest
        stride = 4 * size
        keys = []
        for i in range(num_blocks):
            extras = lora_extra
            if image_extras is not None:
                extras = image_extras[i] + extras
            if salt_extra and i == 0:
                extras += salt_extra
            if has_embeds:
                block_start = start + i * size
                embeds = self._prompt_embeds_digest(request, block_start, block_start + size)
                extras += layout.prompt_embeds_extra(embeds)
            parent = digest(parent + tokens[i * stride : (i + 1) * stride] + extras)
            keys.append(parent)
        return keys

    def _image_extras(self, request: Any, start: int, num_blocks: int) -> list[bytes]:
        """For each new block the extras field of the image state at its end; b"" before the first image.

        An image enters the state with the first block that its placeholder range overlaps, as in vLLM's own keys.
        """
        size = self.block_size
        positions = [
            (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
        ]
        # An empty range at a block's edge overlaps no block: as in vLLM's own keys, it is in none.
        positions = [position for position in positions if position[2] or position[1] % size]
        memo = getattr(request, _MEMO, None)
        if memo is None or memo[0] != positions:
            memo = (positions, [layout.image_extra(state) for state in layout.image_states(positions)])
            setattr(request, _MEMO, memo)
        extras: list[bytes] = []
        field = b""
        for (_, offset, _), after in zip(positions, memo[1], strict=True):
            entered = offset // size - start // size
            if entered > len(extras):
                extras.extend([field] * (min(entered, num_blocks) - len(extras)))
            if entered >= num_blocks:
                break
            field = after
        extras.extend([field] * (num_blocks - len(extras)))
        return extras
