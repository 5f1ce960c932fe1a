# SPDX-License-Identifier: Apache-2.0
"""Real vLLM requests with any layout of tokens, images, salt, LoRA and prompt embeddings, for the key tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request


@dataclass(frozen=True)
class Prompt:
    """A request to be. images are (content id, offset, length) in prompt order; embeds_seed makes prompt_embeds."""

    tokens: tuple[int, ...]
    images: tuple[tuple[str, int, int], ...] = ()
    salt: str | None = None
    lora: tuple[str, str] | None = None
    embeds_seed: int | None = None

    def changed(self, **fields: Any) -> "Prompt":
        """A copy with other fields."""
        return replace(self, **fields)


def make_request(prompt: Prompt, hasher: Callable[[Request], Sequence[bytes]]) -> Request:
    """The real Request of a prompt, hashed by `hasher`."""
    embeds = None
    if prompt.embeds_seed is not None:
        generator = torch.Generator().manual_seed(prompt.embeds_seed)
        embeds = torch.randn(len(prompt.tokens), 4, generator=generator)
    return Request(
        request_id="r",
        prompt_token_ids=list(prompt.tokens),
        prompt_embeds=embeds,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        mm_features=[
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=offset, length=length)
            )
            for name, offset, length in prompt.images
        ],
        lora_request=LoRARequest(prompt.lora[0], 1, prompt.lora[1]) if prompt.lora else None,
        cache_salt=prompt.salt,
        block_hasher=hasher,
    )


def original(function: Any) -> Any:
    """vLLM's own function, also where the plugin is installed in this process."""
    return getattr(function, "__wrapped__", function)


def stock_hasher(
    block_size: int, hash_function: Callable[[Any], bytes], **more: Any
) -> Callable[[Request], list[bytes]]:
    """vLLM's own block hasher, with further arguments of its version."""
    kv_cache_utils.init_none_hash(hash_function)
    hasher: Callable[[Request], list[bytes]] = original(kv_cache_utils.get_request_block_hasher)(
        block_size, hash_function, **more
    )
    return hasher


def our_hasher(block_size: int, hash_function: Callable[[Any], bytes]) -> Callable[[Request], list[bytes]]:
    """The block hasher that the plugin hands to the engine."""
    from vllm_mmcache.components.block_keys.hooks import make_block_hasher

    kv_cache_utils.init_none_hash(hash_function)
    hasher: Callable[[Request], list[bytes]] = make_block_hasher(
        original(kv_cache_utils.get_request_block_hasher), None, (block_size, hash_function), {}
    )
    return hasher


def keys(prompt: Prompt, hasher: Callable[[Request], list[bytes]]) -> list[bytes]:
    """The block keys of a prompt."""
    return list(make_request(prompt, hasher).block_hashes)


def stored(prompt: Prompt, hasher: Callable[[Request], list[bytes]], block_size: int) -> Any:
    """The BlockStored event of a prompt's full blocks, from vLLM's real block pool."""
    request = make_request(prompt, hasher)
    pool = BlockPool(num_gpu_blocks=64, enable_caching=True, hash_block_size=block_size, enable_kv_cache_events=True)
    count = len(request.block_hashes)
    pool.cache_full_blocks(
        request=request,
        blocks=pool.get_new_blocks(count),
        num_cached_blocks=0,
        num_full_blocks=count,
        block_size=block_size,
        kv_cache_group_id=0,
    )
    (event,) = pool.take_events()
    return event
