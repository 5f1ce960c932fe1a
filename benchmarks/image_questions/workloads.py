# SPDX-License-Identifier: Apache-2.0
"""Workloads in which images come again under other questions, as conversations that are put one after the other.

Each workload yields (counts, conversation) and is sent the answer; counts says whether the request belongs to the
measure (from the second question about an image on). Used by the benchmark and, smaller, by the exactness tests.
"""

from collections.abc import Callable
from typing import Any

from vllm_mmcache.prove.scenarios import assistant, filler, picture, user
from vllm_mmcache.prove.workloads import Asks, Shape, questions

SHAPES = {
    "gemma3": Shape((224, 224), 530),
    "qwen3-vl": Shape((1024, 1024), 0),
    "qwen3.5": Shape((1024, 1024), 0),
}


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
