# SPDX-License-Identifier: Apache-2.0
"""The oracle: Transformers on the cold full prompt, with the tokens that the engine chose forced upon it.

One forward pass over prompt and answer gives the log-probabilities of every step, and the answer is the greedy
one exactly when each token is the argmax of its step. A Transformers cache is never continued: doing that with a
second image is itself wrong for Qwen's positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


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
