# SPDX-License-Identifier: Apache-2.0
"""What bounds the tokens of a request in a step, and what a request's images need of it. API and engine process."""

from collections.abc import Iterable
from typing import Any

from packaging.version import Version

from vllm_mmcache.base import settings
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.image_spans.limits import Item, Limit, Limits

_FROM_0_33 = Version(vllm_version()) >= Version("0.33")


def step_limits(vllm_config: Any) -> tuple[Limit, ...]:
    """What bounds the tokens of a request in a step, each with the name by which it is set."""
    config, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    drafts = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
    limits = [Limit("max_num_batched_tokens", config.max_num_batched_tokens, drafts)]
    if config.max_num_scheduled_tokens is not None:
        limits.append(Limit("max_num_scheduled_tokens", config.max_num_scheduled_tokens))
    if config.long_prefill_token_threshold > 0:
        # vLLM lifts it for a request that is alone, and nobody can count on that. Its adaptive form falls to it, too.
        limits.append(Limit("long_prefill_token_threshold", config.long_prefill_token_threshold))
    window = vllm_config.model_config.get_sliding_window()
    if window and not (_FROM_0_33 or settings.current().allow_causal_images) and vllm_config.use_v2_model_runner:
        # It leaves longer images out of the spans even where the model clamps them (Gemma 4): they would run causally.
        limits.append(Limit("sliding_window, with model runner V2 of vLLM 0.32,", window, is_of_spans=True))
    return tuple(limits)


def limits_of(vllm_config: Any, encoder_embeddings: int) -> Limits:
    """The limits of an engine with this configuration; encoder_embeddings is the size of its encoder cache."""
    lookahead = vllm_config.num_prefill_lookahead_tokens
    # 0.32 ends a step before an item that has no room by the drafter's lookahead too early, so inside the span before
    # it; and it does split an item where a step begins on it, which it does unless that lookahead comes between.
    whole = vllm_config.scheduler_config.disable_chunked_mm_input and (_FROM_0_33 or lookahead > 0)
    return Limits(
        step_limits(vllm_config), encoder_embeddings, 0 if _FROM_0_33 else lookahead, lookahead if whole else None
    )


def engine_limits(scheduler: Any) -> Limits:
    """The limits that a scheduler goes by."""
    cache_size = scheduler.encoder_cache_manager.cache_size
    return limits_of(scheduler.vllm_config, min(cache_size, scheduler.max_num_encoder_input_tokens))


def items_of(features: Iterable[Any]) -> list[Item]:
    """The images of a request, in its order, and whatever else has embeddings."""
    found = []
    for feature in features:
        position = feature.mm_position
        found.append(Item(position.offset, position.length, position.get_num_embeds(), feature.identifier))
    return found
