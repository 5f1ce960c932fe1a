# SPDX-License-Identifier: Apache-2.0
"""The oracle: Transformers on the cold full prompt, with the tokens that the engine chose forced upon it.

One forward pass over prompt and answer gives the log-probabilities of every step, and the answer is the greedy
one exactly when each token is the argmax of its step. A Transformers cache is never continued: doing that with a
second image is itself wrong for Qwen's positions.

float32 answers are within 1e-3 of it, and their greedy tokens are its own but for ties. For bfloat16 (qwen3.5 and
qwen3.5-moe, whose GDN kernel wants it on the CPU) it gives a coarse bound alone. What a wrong picture does is measured
by `assert_detects`: it must exceed these bounds many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmcache_tools.harness.tolerances import TIE, TOLERANCE
from vllm_mmcache.exactness.answers import Answer, Inexact

BF16_ORACLE_TOLERANCE = 0.7  # against Transformers in float32


class Oracle:
    """Transformers' model in float32, and processor, of one zoo directory."""

    def __init__(self, directory: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(directory)
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()

    def encode(self, prompt: str, images: Sequence[Image.Image], **processor_kwargs: Any) -> dict[str, Any]:
        """The processor's tensors for one prompt; input_ids (1, num_tokens) int64 with images expanded."""
        return dict(self.processor(text=prompt, images=list(images) or None, return_tensors="pt", **processor_kwargs))

    def log_probabilities(
        self, prompt: str, images: Sequence[Image.Image], token_ids: Sequence[int], **processor_kwargs: Any
    ) -> tuple[list[int], torch.Tensor]:
        """Prompt ids, and the log-probabilities of each step of `token_ids` after the cold prompt.

        Shapes: (num_answer_tokens, vocab) float32.
        """
        inputs = self.encode(prompt, images, **processor_kwargs)
        prompt_ids = inputs.pop("input_ids")
        inputs.pop("attention_mask")
        answer = torch.tensor([list(token_ids)])
        ids = torch.cat([prompt_ids, answer], dim=1)
        for kind in ("mm_token_type_ids", "token_type_ids"):
            if kind in inputs:
                inputs[kind] = torch.cat([inputs[kind], torch.zeros_like(answer)], dim=1)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
        start = prompt_ids.shape[1]
        return prompt_ids[0].tolist(), logits[start - 1 : -1].float().log_softmax(-1)


def step_deltas(answer: Answer, oracle: torch.Tensor) -> list[float]:
    """Per step, the largest |delta logprob| over the chosen token and the engine's best ones.

    Shapes: oracle (num_answer_tokens, vocab) float32.
    """
    return [
        max(abs(value - float(oracle[i, token])) for token, value in step.items())
        for i, step in enumerate(answer.logprobs)
    ]


def assert_equals_oracle(answer: Answer, oracle: Oracle, tolerance: float = TOLERANCE) -> float:
    """The largest delta to Transformers; Inexact when over the tolerance or when a greedy token differs."""
    prompt_ids, expected = oracle.log_probabilities(answer.prompt, answer.images, answer.token_ids)
    assert tuple(prompt_ids) == answer.prompt_ids, "vLLM and Transformers expand the prompt differently"
    delta = max(step_deltas(answer, expected))
    if delta > tolerance:
        raise Inexact(f"log-probabilities differ by {delta:.2e} > {tolerance:.0e} for {answer.prompt[-80:]!r}")
    greedy = expected.argmax(-1).tolist()
    gaps = expected.max(-1).values - expected[torch.arange(len(greedy)), list(answer.token_ids)]
    tie = TIE if tolerance <= TOLERANCE else 2 * tolerance
    if bool((gaps > tie).any()):
        raise Inexact(f"tokens {list(answer.token_ids)} instead of {greedy}")
    return delta


def assert_detects(answer: Answer, other: Answer, oracle: Oracle) -> float:
    """Negative control: `answer`, had it been given to the question of `other`, is far out of tolerance.

    Returns the delta, which must be at least three times the widest bound.
    """
    _, expected = oracle.log_probabilities(other.prompt, other.images, answer.token_ids)
    delta = max(step_deltas(answer, expected))
    print(f"wrong picture: {delta:.2f}")
    assert delta > 3 * BF16_ORACLE_TOLERANCE, f"a wrong picture moves log-probabilities by {delta:.3f} only"
    return delta
