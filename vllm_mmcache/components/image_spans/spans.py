# SPDX-License-Identifier: Apache-2.0
"""Where a prefill chunk may end for models whose images attend both ways. Pure, no vLLM.

A span's rows must be computed in one step, since each sees the keys of all: a chunk that ends inside a span would
give wrong KV, which the prefix cache would then serve to everyone.
"""

from collections.abc import Iterable

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
