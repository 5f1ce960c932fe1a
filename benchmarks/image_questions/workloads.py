# SPDX-License-Identifier: Apache-2.0
"""Workloads in which images come again under other questions, as conversations that are put one after the other.

Each workload yields (counts, conversation) and is sent the answer; counts says whether the request belongs to the
measure (from the second question about an image on). Used by the benchmark and, smaller, by the exactness tests.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from tests.exactness.engines import Answer, Rig
from tests.exactness.scenarios import assistant, filler, picture, user

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


SHAPES = {
    "gemma3": Shape((224, 224), 530),
    "qwen3-vl": Shape((1024, 1024), 0),
    "qwen3.5": Shape((1024, 1024), 0),
}


def questions(shape: Shape, images: int, count: int) -> Asks:
    """All questions about one image, then the next image."""
    for image in range(images):
        for number in range(count):
            yield number > 0, [user(shape.text(image), picture(image, shape.size), shape.question(number))]


def interleaved(shape: Shape, images: int, count: int) -> Asks:
    """A question about every image, then the next question."""
    for number in range(count):
        for image in range(images):
            yield number > 0, [user(shape.text(image), picture(image, shape.size), shape.question(number))]


def demos(shape: Shape, queries: int) -> Asks:
    """Two fixed pictures as demonstrations, then a query picture that varies."""
    shots = [filler(shape.words), picture(0, shape.size), "is a cat.", picture(1, shape.size), "is a dog."]
    for number in range(queries):
        yield number > 0, [user(*shots, picture(100 + number, shape.size), shape.question(number))]


def growing(shape: Shape, turns: int) -> Asks:
    """A conversation that adds an image each turn."""
    talk: list[Any] = []
    for turn in range(turns):
        text = filler(shape.words // turns)
        talk.append(user(text, picture(turn, (448, 448)), shape.question(turn)))
        answer = yield turn > 0, list(talk)
        talk.append(assistant(answer.text))


def shifted(shape: Shape, images: int, count: int) -> Asks:
    """Text of another length before each image, so that all positions are shifted."""
    for image in range(images):
        for number in range(count):
            text = filler(200 + 37 * image + shape.words // 2, image)
            yield number > 0, [user(text, picture(image, shape.size), shape.question(number))]


def unique(shape: Shape, requests: int) -> Asks:
    """A shared system prompt, and every picture only once."""
    system = {"role": "system", "content": [{"type": "text", "text": filler(500)}]}
    for number in range(requests):
        yield number > 0, [system, user(picture(1000 + number, (512, 512)), shape.question(number))]


WORKLOADS: dict[str, Callable[[Shape], Asks]] = {
    "20 images x 2 questions": lambda shape: questions(shape, 20, 2),
    "20 images x 5 questions, interleaved": lambda shape: interleaved(shape, 20, 5),
    "two demo images, varying query image, 20 queries": lambda shape: demos(shape, 20),
    "conversation that adds an image each turn, 10 turns": lambda shape: growing(shape, 10),
    "text first, then image, then question": lambda shape: shifted(shape, 6, 3),
}


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
