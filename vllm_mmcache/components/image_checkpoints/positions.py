# SPDX-License-Identifier: Apache-2.0
"""Which positions of a prompt are worth a checkpoint. Pure, no vLLM.

A later request resumes where its prompt stops being equal to an earlier one: after an image that stays (its end, a
question follows) or before an image that varies (its start, fixed demonstrations precede). A checkpoint costs a state
or a window of blocks, for Mamba also a chunk of its own; so there are few, and the likely ones come first.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

START, END = "start", "end"
KINDS = frozenset({START, END})
INNER = "inner "  # before the kind of those that are not likely, where their reuse is counted


@dataclass(frozen=True)
class Checkpoint:
    """A position to resume at, in tokens from the prompt's start, a multiple of the block size."""

    tokens: int
    kinds: frozenset[str]  # what it is: the start of an image, the end of one, or both
    is_likely: bool = True  # among the first that come into question
    ending_image: int | None = None  # the number of the image whose end it is

    @property
    def rated_as(self) -> frozenset[str]:
        """The names under which its reuse is counted (expected_value.py)."""
        return self.kinds if self.is_likely else frozenset(INNER + kind for kind in self.kinds)


def candidates(
    ranges: Sequence[tuple[int, int]], hit_tokens: int, block_tokens: int, lookahead_tokens: int = 0
) -> list[Checkpoint]:
    """Every image boundary behind the prefix hit, floored to a block, the likely ones first.

    ranges are the (offset, length) of the placeholder ranges, in prompt order. lookahead_tokens must be equal behind a
    hit, too: a draft head looks ahead, so vLLM matches a block more and drops it, or each block's key covers tokens
    behind it. First comes the last image's end, then the start of the first image that the hit does not cover and the
    start of the last image; then the other ends from the last to the first, and the other starts.
    """
    kinds: dict[int, set[str]] = {}
    starts = [(offset - lookahead_tokens) // block_tokens * block_tokens for offset, _ in ranges]
    ends = [(offset + length - lookahead_tokens) // block_tokens * block_tokens for offset, length in ranges]
    for kind, positions in ((START, starts), (END, ends)):
        for tokens in positions:
            kinds.setdefault(tokens, set()).add(kind)
    varying = [start for start, end in zip(starts, ends, strict=True) if end > hit_tokens][:1]
    order = [*ends[-1:], *varying, *starts[-1:], *reversed(ends), *reversed(starts)]
    numbers = {tokens: number for number, tokens in enumerate(ends)}
    likely = {*ends[-1:], *varying, *starts[-1:]}
    return [
        Checkpoint(tokens, frozenset(kinds[tokens]), tokens in likely, numbers.get(tokens))
        for tokens in dict.fromkeys(order)
        if tokens > hit_tokens
    ]


def choose(
    found: Sequence[Checkpoint],
    kept_tokens: Collection[int],
    kinds: Collection[str],
    most: int,
    apart_tokens: int,
    pays: Callable[[Checkpoint, Sequence[int]], bool] = lambda checkpoint, chosen: True,
) -> tuple[Checkpoint, ...]:
    """At most `most` of the candidates, in prompt order, apart_tokens or more from each other and the prompt's start.

    kept_tokens are the positions that vLLM keeps by itself, which cost nothing and need nothing; kinds are those that
    are worth their memory (backoff.py). pays says whether one is worth its steps, beside the positions chosen before
    (expected_value.py).
    """
    chosen: list[Checkpoint] = []
    for checkpoint in found:
        if len(chosen) == most:
            break
        others = [0, *(other.tokens for other in chosen)]
        if (
            checkpoint.tokens not in kept_tokens
            and not checkpoint.kinds.isdisjoint(kinds)
            and all(abs(checkpoint.tokens - other) >= apart_tokens for other in others)
            and pays(checkpoint, others[1:])
        ):
            chosen.append(checkpoint)
    return tuple(sorted(chosen, key=lambda checkpoint: checkpoint.tokens))
