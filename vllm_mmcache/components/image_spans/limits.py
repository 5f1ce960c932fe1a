# SPDX-License-Identifier: Apache-2.0
"""Whether a step can ever hold a span that must be computed whole. Pure, no vLLM.

A step that serves one request alone is the largest that the request can get, so a span that such a step can't hold is
never computed, and its request, and in vLLM 0.32 everyone behind it, waits for ever.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_mmcache.components.image_spans.spans import Span


@dataclass(frozen=True)
class Limit:
    """What one of vLLM's settings leaves to one request in one step. Unit: tokens."""

    setting: str
    value: int
    reserved: int = 0  # of the value, for drafts
    is_of_spans: bool = False
    """Whether it bounds spans alone, and not the text around them in a placeholder range."""

    def too_small(self, needed: int) -> str:
        """What to change so that `needed` tokens fit; empty if they do."""
        least = needed + self.reserved
        return f"{self.setting} is {self.value}, needed are {least}" if self.value < least else ""


@dataclass(frozen=True)
class Limits:
    """The limits of an engine.

    embeddings: of all items together that one span needs, in the encoder cache and in one run of the encoder.
    lookahead: up to how many tokens past a span an item begins that the encoder must have run for, too, for a drafter.
    whole_items: None, or vLLM does not split the placeholder range of an item either, which has text around the span,
    and wants so many tokens more in its step.
    """

    steps: tuple[Limit, ...]
    embeddings: int
    lookahead: int = 0
    whole_items: int | None = None


@dataclass(frozen=True)
class Item:
    """An image as the scheduler sees it: its placeholder range, its number of embeddings, and whose they are."""

    first: int
    num_tokens: int
    num_embeddings: int
    identifier: str


def why_never(spans: Iterable[Span], items: Sequence[Item], limits: Limits) -> str:
    """Why a request with these spans and items can never be computed; empty if it can.

    Spans are sorted and disjoint; items are sorted by their first token.
    """
    for first, last in spans:
        num_tokens = last - first + 1
        place = sum(item.first <= first for item in items)
        if reason := too_long(num_tokens, limits.steps):
            return f"image {place} of {len(items)} has {num_tokens} tokens that must be computed in one step: {reason}"
        ends = last + limits.lookahead
        needed = {i.identifier: i.num_embeddings for i in items if i.first <= ends and first < i.first + i.num_tokens}
        if sum(needed.values()) > limits.embeddings:
            return (
                f"image {place} of {len(items)} must be computed in one step with others, {sum(needed.values())} "
                f"embeddings together, and the encoder cache holds {limits.embeddings}: raise max_num_batched_tokens"
            )
    if limits.whole_items is None:
        return ""
    steps = [limit for limit in limits.steps if not limit.is_of_spans]
    for place, item in enumerate(items, 1):
        if reason := too_long(item.num_tokens + limits.whole_items, steps):
            return (
                f"image {place} of {len(items)} has {item.num_tokens} tokens with the text in its placeholder, "
                f"which disable_chunked_mm_input keeps in one step: {reason}"
            )
    return ""


def too_long(num_tokens: int, steps: Iterable[Limit]) -> str:
    """Which settings don't allow num_tokens in one step, and what they must be; empty if all do."""
    return "; ".join(reason for limit in steps if (reason := limit.too_small(num_tokens)))
