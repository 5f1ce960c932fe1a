# SPDX-License-Identifier: Apache-2.0
"""A user's own model: there is no oracle for it, so stock vLLM's answers and its own cold runs are what it must equal.

Prompts go through vLLM's own chat code, as a server's do. Everything else is the rig's: one engine in this process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from vllm import LLM, SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer, Message
from vllm_mmcache.exactness.conversations import assistant, filler, picture, user
from vllm_mmcache.exactness.pictures import png_url
from vllm_mmcache.prove.rig import Rig

SIZE = (448, 448)  # pixels of a picture
FIRST, AGAIN, OTHER = "the first question", "the same again", "another image"


class OwnRig(Rig):
    """One engine of the user's model, with the user's arguments; `overrides` are the check's, and win."""

    def __init__(self, model: str, arguments: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        self.has_small_steps = "max_num_batched_tokens" in overrides
        needed = {
            "enable_prefix_caching": True,
            "max_logprobs": NUM_LOGPROBS,
            "disable_log_stats": False,
            "seed": 0,
        }
        self.llm = LLM(model=model, **{**arguments, **needed, **overrides})
        self._spans: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        add = self.scheduler.add_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
            places = [feature.mm_position for feature in request.mm_features]
            self._spans[tuple(request.prompt_token_ids)] = [(one.offset, one.offset + one.length) for one in places]
            return add(request, *args, **kwargs)

        self.scheduler.add_request = noted

    @property
    def keeps_all_kv(self) -> bool:
        """Whether all KV cache groups are full attention without a window; there is no family to ask."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return all(
            isinstance(manager.kv_cache_spec, FullAttentionSpec)
            and getattr(manager.kv_cache_spec, "sliding_window", None) is None
            for manager in managers
        )

    def render(self, messages: Sequence[Message]) -> tuple[str, tuple[Image.Image, ...]]:
        """The conversation as JSON, with its images beside it: that is what asks for the same again."""
        images: list[Image.Image] = []
        for message in messages:
            if not isinstance(message["content"], str):
                images += [part["image"] for part in message["content"] if part["type"] == "image"]
        return json.dumps(list(messages), default=lambda image: None), tuple(images)

    def ask_rendered(
        self,
        rendered: Sequence[tuple[str, tuple[Image.Image, ...]]],
        lengths: Sequence[int],
    ) -> list[Answer]:
        """Answers through vLLM's own chat code."""
        conversations = [_for_chat(prompt, images) for prompt, images in rendered]
        outputs = self.llm.chat(conversations, [_greedy(length) for length in lengths], use_tqdm=False)
        return [Answer.of(prompt, images, output) for (prompt, images), output in zip(rendered, outputs, strict=True)]

    def enqueue(self, conversation: Sequence[Message], max_tokens: int) -> None:
        """Add a conversation to the engine's queue, through vLLM's own chat code."""
        self.llm.enqueue_chat([_for_chat(*self.render(conversation))], _greedy(max_tokens), use_tqdm=False)

    def image_spans(self, answer: Answer) -> list[tuple[int, int]]:
        """Start and end (exclusive) of what each image became in the prompt."""
        return self._spans[answer.prompt_ids]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)


def _for_chat(prompt: str, images: Sequence[Image.Image]) -> list[Message]:
    """A conversation as a client sends it: images as PNG in data URLs."""
    messages: list[Message] = json.loads(prompt)
    left = iter(images)
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [
                {"type": "image_url", "image_url": {"url": png_url(next(left))}} if part["type"] == "image" else part
                for part in message["content"]
            ]
    return messages


def questions(rig: Rig) -> dict[str, list[Message]]:
    """Conversations with names, to be put in this order; the text before the image fills more than a block."""
    longest = rig.vllm_config.model_config.max_model_len
    text = filler(min(max(180, rig.block_tokens * 5 // 4), longest // 3))
    image, other = picture(900, SIZE), picture(901, SIZE)
    what, edge = "What is in this picture?", "Which colours are at its edge?"
    first = user(text, image, what)
    return {
        FIRST: [first],
        AGAIN: [first],
        "a second question": [user(text, image, edge)],
        OTHER: [user(text, other, what)],
        "the first image again": [user(text, image, what + " Be brief.")],
        "a text turn after it": [first, assistant("It shows coloured shapes."), user("How many of them are there?")],
        "two images": [user(text, image, "and", other, "Are these two the same?")],
        "text alone": [user(text + " What is this about?")],
    }


def as_json(answer: Answer) -> dict[str, Any]:
    """An answer without its images, for another process."""
    return {
        "prompt": answer.prompt,
        "prompt_ids": list(answer.prompt_ids),
        "token_ids": list(answer.token_ids),
        "logprobs": [list(step.items()) for step in answer.logprobs],
        "num_cached_tokens": answer.num_cached_tokens,
        "text": answer.text,
    }


def from_json(said: Mapping[str, Any]) -> Answer:
    """What as_json gave."""
    return Answer(
        prompt=said["prompt"],
        images=(),
        prompt_ids=tuple(said["prompt_ids"]),
        token_ids=tuple(said["token_ids"]),
        logprobs=tuple({int(token): float(value) for token, value in step} for step in said["logprobs"]),
        num_cached_tokens=said["num_cached_tokens"],
        text=said["text"],
    )
