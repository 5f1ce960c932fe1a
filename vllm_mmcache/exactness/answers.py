# SPDX-License-Identifier: Apache-2.0
"""Answers of an engine, and how far two answers to one prompt may be apart.

float32: log-probabilities within 1e-3, and equal greedy tokens but for ties (TIE). bfloat16, and a KV cache that holds
less than was calculated: two correct programs differ by far more than 1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PIL import Image

NUM_LOGPROBS = 10  # of each step that are compared; the zoo's vocabulary has about 1000
TOLERANCE = 1e-3
TIE = 1e-4  # tokens closer than both errors together are both the greedy one; float32 was seen to be 4e-5 off
BF16_SELF_TOLERANCE = 0.5  # against vLLM's own cold run: a hit computes the same sums in other chunks

Message = dict[str, Any]  # content: str, or parts {"type": "text"|"image", "text"|"image": ...}


@dataclass(frozen=True)
class Answer:
    """One question and what the engine said: greedy tokens, and per step the log-probabilities of the best ones."""

    prompt: str
    images: tuple[Image.Image, ...]
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]  # per step: token id -> log-probability, NUM_LOGPROBS of them or more
    num_cached_tokens: int
    text: str

    @classmethod
    def of(cls, prompt: str, images: tuple[Image.Image, ...], output: Any) -> Answer:
        """What vLLM's RequestOutput says."""
        return cls(
            prompt=prompt,
            images=images,
            prompt_ids=tuple(output.prompt_token_ids),
            token_ids=tuple(output.outputs[0].token_ids),
            logprobs=tuple({i: e.logprob for i, e in step.items()} for step in output.outputs[0].logprobs),
            num_cached_tokens=output.num_cached_tokens,
            text=output.outputs[0].text,
        )


class Inexact(AssertionError):
    """The answer is not that of a cold run. The only failure that a strict xfail may stand for."""


def assert_equals_answer(answer: Answer, other: Answer, tolerance: float, whose: str) -> float:
    """The largest delta to another answer to the same prompt; Inexact when over the tolerance or when a token differs.

    After a tie the answers go on from other tokens, and nothing more is compared.
    """
    assert answer.prompt_ids == other.prompt_ids, f"the prompt has other tokens than in {whose}"
    worst = 0.0
    tie = TIE if tolerance <= TOLERANCE else 2 * tolerance
    for step, (seen, expected) in enumerate(zip(answer.logprobs, other.logprobs, strict=True)):
        shared = seen.keys() & expected.keys()
        delta = max(abs(seen[token] - expected[token]) for token in shared) if shared else float("inf")
        worst = max(worst, delta)
        if delta > tolerance:
            raise Inexact(f"step {step}: log-probabilities differ by {delta:.2e} > {tolerance:g} from {whose}")
        if answer.token_ids[step] != other.token_ids[step]:
            gap = expected[other.token_ids[step]] - expected.get(answer.token_ids[step], float("-inf"))
            if gap > tie:
                raise Inexact(
                    f"step {step}: token {answer.token_ids[step]}, not {other.token_ids[step]} as in {whose}, "
                    f"where it is worse by {gap:.2e}"
                )
            break
    return worst
