# SPDX-License-Identifier: Apache-2.0
"""Messages of words and pictures that a number chooses, for checks, tests and benchmarks. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from PIL import Image

from vllm_mmcache.exactness.answers import Answer, Message
from vllm_mmcache.exactness.pictures import ellipses


class Engine(Protocol):
    """What answers conversations, such as prove/rig.py's."""

    def ask(self, *conversations: Sequence[Message], max_tokens: Any = ...) -> list[Answer]:
        """Answers to all conversations, submitted together."""


WORDS = "red cat dog bird horse tree river table chair lamp bridge boat train street garden cloud".split()  # noqa: SIM905


def picture(number: int, size: tuple[int, int] = (224, 224)) -> Image.Image:
    """The picture of a number. size is (width, height) in pixels."""
    return ellipses(f"exactness {number}", size)


def filler(num_words: int, start: int = 0) -> str:
    """`num_words` words of one token each, all with a space before."""
    return "".join(" " + WORDS[(start + i) % len(WORDS)] for i in range(num_words))


def user(*parts: str | Image.Image) -> Message:
    """A user's message, of texts and pictures in this order."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"role": "user", "content": content}


def assistant(text: str) -> Message:
    """An earlier answer, as the next turn sends it back."""
    return {"role": "assistant", "content": text}


def one(rig: Engine, *messages: Message, max_tokens: int = 8) -> Answer:
    """The answer to one conversation alone in the engine; `max_tokens` tokens of it, greedy."""
    return rig.ask(messages, max_tokens=max_tokens)[0]
