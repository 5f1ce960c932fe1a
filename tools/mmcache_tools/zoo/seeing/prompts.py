# SPDX-License-Identifier: Apache-2.0
"""Conversations about pictures, with the right answer to every question.

An answer names first and judges then ("red circle, blue square: different"), so that the verdict can be read off the
words before it. Same means same colour and same shape; place, size and shade don't count. A plan is a list of kinds
of turns; what a plan says about pictures is drawn from a stream of random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmcache_tools.zoo.seeing.pictures import COLOURS, SHAPES, THINGS, Thing, draw, stream

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

# kind of turn -> how many new pictures come with the question, how many there must be then, wordings of the question
KINDS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "talk": (0, 0, ("Hello!", "Are you ready?", "I have some pictures for you.", "Please look at my pictures.")),
    "name": (
        1, 1,
        (
            "What is in the picture?", "What is this?", "What do you see?", "And in this one?", "Name the thing.",
            "Look at this picture. What is in it?", "Please name what you see.",
        ),
    ),
    "both": (
        2, 2,
        (
            "Are these two the same?", "Compare the two pictures.", "Compare these two.", "Is it the same thing twice?",
            "Here are two pictures. Are they the same or different?",
        ),
    ),
    "with_last": (
        1, 2,
        (
            "Compare it with the picture before.", "Is it the same as the last one?",
            "Compare it with the last picture.", "Here is another one. Is it the same as the one before?",
        ),
    ),
    "with_first": (
        1, 2,
        (
            "Compare it with the first picture.", "Is it the same as the first one?",
            "Is that what the first picture shows?",
        ),
    ),
    "last_two": (0, 2, ("Compare the last two pictures.", "Are the last two pictures the same?")),
    "colour": (0, 1, ("Which colour is it?", "What colour is the last one?", "Name the colour of the last picture.")),
    "shape": (0, 1, ("Which shape is it?", "What shape is the last one?", "Name the shape of the last picture.")),
    "first": (0, 1, ("What is in the first picture?", "What was the first thing?", "Name the first one again.")),
    "last": (0, 1, ("What is in the last picture?", "What was the last thing?", "Name the last one again.")),
}  # fmt: skip

SYSTEMS = (
    "You look at pictures and name them.",
    "You are a careful assistant. You look at every picture, then you name the colour and the shape of the thing in "
    "it. When there are two pictures, you name both of them and say whether they are the same or different.",
)

MAX_PICTURES = 6
MAX_TURNS = 12


@dataclass(frozen=True)
class Turn:
    """One question with the pictures that are new in it, and the right answer."""

    question: str
    pictures: tuple[Image.Image, ...]
    answer: str
    things: tuple[Thing, ...] = ()  # what is in `pictures`


@dataclass(frozen=True)
class Conversation:
    """Turns in order; the last one's answer is what is asked for."""

    turns: tuple[Turn, ...]
    system: str | None = None

    @property
    def answer(self) -> str:
        """The right answer to the last question."""
        return self.turns[-1].answer

    @property
    def pictures(self) -> list[Image.Image]:
        """All pictures, in the order in which they are shown."""
        return [picture for turn in self.turns for picture in turn.pictures]

    def messages(self) -> list[dict[str, Any]]:
        """As Transformers and vLLM take them, up to the last question; pictures come before the question."""
        made: list[dict[str, Any]] = []
        if self.system is not None:
            made.append({"role": "system", "content": self.system})
        for turn in self.turns:
            content: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in turn.pictures]
            made.append({"role": "user", "content": [*content, {"type": "text", "text": turn.question}]})
            made.append({"role": "assistant", "content": turn.answer})
        return made[:-1]


def verdict(one: Thing, other: Thing) -> str:
    """The right answer to every question that compares."""
    return f"{one}, {other}: {'same' if one == other else 'different'}"


def right_answer(kind: str, things: Sequence[Thing]) -> str:
    """The answer when these things have been shown so far, those of this turn included."""
    if kind == "talk":
        return "Yes."
    if kind in ("name", "last"):
        return str(things[-1])
    if kind in ("both", "with_last", "last_two"):
        return verdict(things[-2], things[-1])
    if kind == "with_first":
        return verdict(things[0], things[-1])
    if kind == "first":
        return str(things[0])
    return {"colour": things[-1].colour, "shape": things[-1].shape}[kind]


def other_thing(random: np.random.Generator, thing: Thing) -> Thing:
    """The same in half of all cases; else half of them differ in one property alone, which is the harder part."""
    if random.random() < 0.5:
        return thing
    choice = random.random()
    colours = [c for c in COLOURS if c != thing.colour] if choice >= 0.25 else [thing.colour]
    shapes = [s for s in SHAPES if s != thing.shape] if not 0.25 <= choice < 0.5 else [thing.shape]
    return Thing(colours[random.integers(len(colours))], shapes[random.integers(len(shapes))])


def converse(random: np.random.Generator, plan: Sequence[str], system: str | None = None) -> Conversation:
    """A conversation by this plan, with new pictures."""
    shown: list[Thing] = []
    turns = []
    for kind in plan:
        num_new, num_needed, wordings = KINDS[kind]
        assert len(shown) + num_new >= num_needed, f"{kind} needs {num_needed} pictures"
        new: list[Thing] = []
        for _ in range(num_new):
            before = [*shown, *new]
            if kind == "with_first":
                new.append(other_thing(random, before[0]))
            elif before and kind != "name":
                new.append(other_thing(random, before[-1]))
            else:
                new.append(THINGS[random.integers(len(THINGS))])
        shown += new
        pictures = tuple(draw(random, thing) for thing in new)
        question = wordings[random.integers(len(wordings))]
        turns.append(Turn(question, pictures, right_answer(kind, shown), tuple(new)))
    return Conversation(tuple(turns), system)


def random_plan(random: np.random.Generator, num_turns: int, max_pictures: int = MAX_PICTURES) -> list[str]:
    """Kinds of turns that fit one another and have so many pictures; one in eight begins with small talk."""
    plan: list[str] = []
    num_pictures = 0
    if num_turns > 1 and random.random() < 0.125:
        plan.append("talk")
    while len(plan) < num_turns:
        fits = [
            kind
            for kind, (num_new, num_needed, _) in KINDS.items()
            if kind != "talk" and num_needed <= num_pictures + num_new <= max_pictures
        ]
        kind = fits[random.integers(len(fits))]
        plan.append(kind)
        num_pictures += KINDS[kind][0]
    return plan


def random_system(random: np.random.Generator) -> str | None:
    """None for most; the long one, which makes up most of a short prompt, for one in eight."""
    choice = random.random()
    return SYSTEMS[1] if choice < 0.125 else SYSTEMS[0] if choice < 0.375 else None


def all_text() -> Iterator[str]:
    """Everything that is ever said, for the tokenizer: each of these words becomes one token."""
    for _ in range(20):
        yield from (f"system\n{system}" for system in SYSTEMS)
        for _, _, wordings in KINDS.values():
            yield from (f"user\n{wording}" for wording in wordings)
        for thing in THINGS:
            yield f"assistant\n{thing}, {thing}: same"
            yield f"assistant\n{thing.shape}"
            yield f"assistant\n{thing.colour}: different\nYes."


def held_out(number: int) -> Conversation:
    """Conversation `number` of those that training never sees: one to four turns about one or two pictures."""
    random = stream("held out", number)
    return converse(random, random_plan(random, 1 + number % 4, max_pictures=2), random_system(random))


def long_held_out(number: int) -> Conversation:
    """The same, up to the longest that it was trained on: 5 to 12 turns about up to six pictures."""
    random = stream("long held out", number)
    return converse(random, random_plan(random, 5 + number % (MAX_TURNS - 4)), random_system(random))
