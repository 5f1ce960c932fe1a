# SPDX-License-Identifier: Apache-2.0
"""Questions about images that come again, as conversations that are put one after the other, and what was reused.

A workload yields (counts, conversation) and is sent the answer; counts says whether the request belongs to the
measure (from the second question about an image on). For the checks, and for tests and benchmarks, which have more.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from vllm_mmcache.exactness.answers import Answer
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.prove.rig import Rig

Tag = TypeVar("Tag")  # what a workload says of a request beside its conversation
Asks = Generator[tuple[bool, list[Any]], Answer, None]


@dataclass(frozen=True)
class Shape:
    """What a family needs so that there is something to reuse. Units: pixels, words (about one token each)."""

    size: tuple[int, int]
    words: int  # of text before the image

    def text(self, image: int) -> str:
        """What precedes an image: other words for each image, from the first one on."""
        return f"{image}.{filler(self.words, image)}"

    def question(self, number: int) -> str:
        """A question that differs from the others from its first word on."""
        return f"{number}:{filler(300, number)}?"


def questions(shape: Shape, images: int, count: int) -> Asks:
    """All questions about one image, then the next image."""
    for image in range(images):
        for number in range(count):
            yield number > 0, [user(shape.text(image), picture(image, shape.size), shape.question(number))]


def put(
    ask: Callable[[Tag, list[Any]], Answer], asks: Generator[tuple[Tag, list[Any]], Answer, None]
) -> Iterator[tuple[Tag, Answer]]:
    """Put all requests of a workload, one after the other."""
    tag, conversation = next(asks)
    while True:
        answer = ask(tag, conversation)
        yield tag, answer
        try:
            tag, conversation = asks.send(answer)
        except StopIteration:
            return


def run(rig: Rig, asks: Asks, max_tokens: int = 4) -> list[tuple[bool, Answer]]:
    """The answers to all requests of a workload."""
    return list(put(lambda _, conversation: rig.ask(conversation, max_tokens=max_tokens)[0], asks))


def reuse(rig: Rig, answers: list[tuple[bool, Answer]]) -> dict[str, int]:
    """Tokens that were cached, and that could have been: the longest prefix shared with any earlier request.

    The best possible is floored to the block size, and leaves the prompt's last token to be computed.
    """
    seen: list[list[Any]] = []
    cached = best = 0
    block = rig.block_tokens
    for counts, answer in answers:
        content = contents(rig, answer)
        longest = max((shared(content, other) for other in seen), default=0)
        if counts:
            cached += answer.num_cached_tokens
            best += reusable(longest, content, block)
        seen.append([*content, *answer.token_ids])
    return {"cached_tokens": cached, "best_tokens": best}


def contents(rig: Rig, answer: Answer) -> list[Any]:
    """The prompt, position by position: a token id, or the pixels of the image that the position belongs to."""
    found: list[Any] = list(answer.prompt_ids)
    for (start, end), image in zip(rig.image_spans(answer), answer.images, strict=True):
        found[start:end] = [hash((image.size, image.tobytes()))] * (end - start)
    return found


def reusable(longest: int, content: list[Any], block: int) -> int:
    """What a prompt could reuse of a shared prefix: whole blocks, and never its last token."""
    return min(longest, len(content) - 1) // block * block


def shared(one: list[Any], other: list[Any]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
