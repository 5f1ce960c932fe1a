# SPDX-License-Identifier: Apache-2.0
"""Where a prefill chunk may end for models whose images attend both ways. Pure, no vLLM.

A span's rows must be computed in one step, since each sees the keys of all: a chunk that ends inside a span would
give wrong KV, which the prefix cache would then serve to everyone.
"""

from collections.abc import Iterable
from typing import Any

from vllm_mmcache.base import status

Span = tuple[int, int]
"""First and last position of the tokens that attend both ways, both inclusive."""


def whole_spans(start: int, num_new_tokens: int, spans: Iterable[Span]) -> int:
    """How many of num_new_tokens from position start on can be scheduled without splitting a span.

    spans are sorted and disjoint. 0 means: not in this step; the rest of a span that a prefix hit has begun, or a span
    that starts here, does not fit in what is left of the budget.
    """
    end = start + num_new_tokens
    for first, last in spans:
        if first >= end:
            break
        if last >= end:
            return max(0, first - start)
    return num_new_tokens


_SPANS = "_mmcache_spans"


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
