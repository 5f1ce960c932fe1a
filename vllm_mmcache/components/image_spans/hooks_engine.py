# SPDX-License-Identifier: Apache-2.0
"""Keeps the scheduler from splitting the span of a bidirectional image. Engine process, scheduler thread.

Wraps the one place where vLLM decides how much of a request with images goes into a step. Also lets go of an encoder
output as soon as its last embedding is computed: vLLM holds it to the end of the placeholder range, and Gemma 3's
ranges overlap by a newline token, so two adjacent images with a small encoder cache waited for each other for ever.
"""

from collections.abc import Sequence
from typing import Any

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument, named
from vllm_mmcache.components.image_spans.spans import Span, whole_spans

_SPANS = "_mmcache_spans"
BLOCKED = "_mmcache_blocked"  # on the scheduler: the first request that this step had no room for


def make_atomic(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._try_schedule_encoder_inputs: the same answer for a chunk that splits no span."""
    if not keeps_images_whole(instance.vllm_config):
        return wrapped(*args, **kwargs)
    given = named(wrapped, args, kwargs)
    spans = image_spans(given["request"])
    start = given["num_computed_tokens"]
    fits = whole_spans(start, given["num_new_tokens"], spans)
    if fits == 0 < given["num_new_tokens"] and getattr(instance, BLOCKED, None) is None:
        setattr(instance, BLOCKED, given["request"].request_id)
    while True:
        given["num_new_tokens"] = whole_spans(start, given["num_new_tokens"], spans)
        answer = wrapped(**given)
        fits = whole_spans(start, answer[1], spans)
        if fits == answer[1]:
            return answer
        given["num_new_tokens"] = fits


def free_after_last_embedding(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._free_encoder_inputs: also frees outputs whose embeddings are all computed."""
    outcome = wrapped(*args, **kwargs)
    request = argument(wrapped, args, kwargs, "request")
    if not keeps_images_whole(instance.vllm_config):
        return outcome
    computed = request.num_computed_tokens - request.num_output_placeholders - instance.num_prefill_lookahead
    for input_id in list(instance.encoder_cache_manager.get_cached_input_ids(request)):
        if last_embedding(request.mm_features[input_id]) < computed:
            instance._free_encoder_input(request, input_id)
    return outcome


def skip_computed_images(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of get_mm_features_in_window as the scheduler sees it: leaves out images that need nothing more.

    An image whose last embedding lies before the window overlaps it with text only, so its output isn't needed again.
    """
    lo, hi = wrapped(*args, **kwargs)
    if not status.is_on("image_spans"):
        return lo, hi
    mm_features: Sequence[Any] = argument(wrapped, args, kwargs, "mm_features")
    start = argument(wrapped, args, kwargs, "start")
    while lo < hi and last_embedding(mm_features[lo]) < start:
        lo += 1
    return lo, hi


def image_spans(request: Any) -> list[Span]:
    """The spans of a request's images, kept on the request while its images stay the same."""
    kept = getattr(request, _SPANS, None)
    if kept is None or kept[0] != len(request.mm_features):
        spans = [
            span
            for feature in request.mm_features
            if feature.modality != "audio"
            for span in feature.mm_position.extract_embeds_range()
        ]
        kept = (len(request.mm_features), sorted(spans))
        setattr(request, _SPANS, kept)
    found: list[Span] = kept[1]
    return found


def keeps_images_whole(vllm_config: Any) -> bool:
    """Whether images of this deployment attend both ways, so that a step must hold each as a whole."""
    return status.is_on("image_spans") and bool(vllm_config.model_config.is_mm_prefix_lm)


def last_embedding(feature: Any) -> int:
    """Position of the last embedding of an image's placeholder range."""
    position = feature.mm_position
    if position.is_embed is None:
        return int(position.offset + position.length - 1)
    spans = position.extract_embeds_range()
    return int(spans[-1][1]) if spans else int(position.offset - 1)
