# SPDX-License-Identifier: Apache-2.0
"""Answers of an engine, and an error where one is further from others to the same prompt than it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vllm_mmcache.exactness import distance

NUM_LOGPROBS = 10  # of each step that are compared; the zoo's vocabulary has about 1000

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


def assert_near(answer: Answer, others: Sequence[Answer], bound: float, whose: str) -> float:
    """The distance to the nearest of other answers to the same prompt; Inexact where it is larger than `bound`.

    Distances are shares of the probability (distance.py). `whose` says in words whose answers the others are.
    """
    for other in others:
        assert answer.prompt_ids == other.prompt_ids, f"the prompt has other tokens than in {whose}"
    far = min(distance.between(answer, other) for other in others)
    if far > bound:
        raise Inexact(f"the answer is {far:.2g} from {whose}, and {bound:.2g} is allowed")
    return far
