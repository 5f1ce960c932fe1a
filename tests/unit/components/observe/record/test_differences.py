# SPDX-License-Identifier: Apache-2.0
"""What a difference is charged with: causes that are planted with a known cost, and what holds for any two prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.components.observe.record import differences, wire
from vllm_mmcache.components.observe.record.causes import Lookup, explain
from vllm_mmcache.components.observe.record.history import Entry, HistoryMatch, Match
from vllm_mmcache.components.observe.record.resync import MIN_SHARED_TOKENS
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.components.observe.record.wire import Cause

NEW, TEXT, IMAGE = Reason.NEW_CONTENT, Reason.TEXT_DIFFERS, Reason.IMAGE_DIFFERS
TEMPLATE = Reason.TEMPLATE_REWROTE
MARK, END, PLACEHOLDER = 1, 2, 3
ROLES = {"system": 4, "user": 5, "assistant": 6}
HEAD = 2  # tokens of a turn before its text: the mark and the role


@dataclass(frozen=True)
class Picture:
    name: str
    length: int = 100


Part = Picture | Sequence[int]


def text(length: int, number: int = 0) -> list[int]:
    """No token of it is in a text of another number."""
    return [1000 * (number + 1) + index for index in range(length)]


@dataclass
class Talk:
    """A prompt with a template of one kind: each turn has a head of two tokens, its parts, and an end."""

    tokens: list[int] = field(default_factory=list)
    notes: wire.Notes = field(default_factory=wire.Notes)

    def turn(self, role: str, *parts: Part, message: int | None = None) -> Talk:
        """message: the digest of what the client sent; by default that of the parts."""
        talk = self.open(role).add(*parts, [END])
        digest = hash(str(parts)) % 2**32 if message is None else message
        talk.notes.messages.append(digest)
        return talk

    def open(self, role: str = "assistant") -> Talk:
        notes = self.notes
        turns, roles = [*notes.turns, len(self.tokens)], [*notes.roles, role]
        talk = Talk(self.tokens, wire.Notes(turns, roles, [*notes.messages], notes.spans, notes.images))
        return talk.add([MARK, ROLES[role]])

    def add(self, *parts: Part) -> Talk:
        tokens, spans, images = [*self.tokens], [*self.notes.spans], [*self.notes.images]
        for part in parts:
            if isinstance(part, Picture):
                spans.append((len(tokens), part.length, part.name))
                images.append((part.name, "", 10 * part.length, 10))
                tokens += [PLACEHOLDER] * part.length
            else:
                tokens += part
        return Talk(tokens, wire.Notes(self.notes.turns, self.notes.roles, self.notes.messages, spans, images))

    def content(self) -> list[object]:
        """The tokens, those of images with their image."""
        found: list[object] = [*self.tokens]
        for offset, length, name in self.notes.spans:
            found[offset : offset + length] = [(name, index) for index in range(length)]
        return found

    def entry(self, answer: Sequence[int] = ()) -> Entry:
        """As the history remembers it; answer: its tokens that have KV."""
        _, _, notes = wire.open_notes(wire.pack("t", "r", self.notes))
        entry = Entry("old", 0.0, "", "", len(self.tokens), notes=notes)
        entry.tokens.extend([*self.tokens, *answer])
        return entry


def charged(new: Talk, earlier: Talk, answer: Sequence[int] = ()) -> list[Cause]:
    """The causes of all behind the first difference."""
    theirs = [*earlier.content(), *answer]
    common = next((i for i, (a, b) in enumerate(zip(new.content(), theirs, strict=False)) if a != b), None)
    if common is None:
        common = min(len(new.tokens), len(theirs))
    match = Match(earlier.entry(answer), common)
    causes = explain(new.entry(), HistoryMatch(0, match, None), Lookup(common, 1, ""))
    assert_covered(causes, common, len(new.tokens))
    return causes


def assert_covered(causes: Sequence[Cause], start: int, end: int) -> None:
    for cause in causes:
        assert cause.start == start
        assert cause.tokens > 0
        start += cause.tokens
    assert start == end


def runs(causes: Sequence[Cause]) -> list[tuple[Reason, int]]:
    return [(cause.reason, cause.tokens) for cause in causes]


RULES = text(200)
START = Talk().turn("system", RULES)
ASKED = START.turn("user", Picture("first"), text(30, 1)).open()
GIVEN = text(8, 2)  # an answer, of which all tokens have KV
REWRITTEN = text(8, 3)


def follow_up(answer: Sequence[int], *parts: Part) -> Talk:
    talk = START.turn("user", Picture("first"), text(30, 1)).turn("assistant", answer)
    return talk.turn("user", *parts).open()


def test_a_conversation_that_only_grows_is_new_content() -> None:
    more = follow_up(GIVEN, Picture("new", 880), text(20, 4))
    assert runs(charged(more, ASKED, GIVEN)) == [(NEW, 1 + HEAD + 880 + 20 + 1 + HEAD)]


def test_a_rewritten_answer_and_then_a_new_image() -> None:
    """All 917 tokens from the answer on had been put down to the answer; it cost 8."""
    more = follow_up(REWRITTEN, Picture("new", 880), text(23, 4))
    first, rest = charged(more, ASKED, GIVEN)
    assert first.tokens + rest.tokens == 917
    assert (first.reason, first.tokens, first.details) == (TEXT, 8, {"turn": 2, "answer": True})
    assert (rest.reason, rest.tokens, rest.at) == (NEW, 909, rest.start)


@pytest.mark.parametrize("length", [5, 8, 13])
def test_a_rewritten_answer_costs_at_most_what_the_answer_was(length: int) -> None:
    more = follow_up(text(length, 3), text(20, 4))
    cost = min(length + 1, 8)  # with the end of the turn, where the answer had more than was sent back
    assert runs(charged(more, ASKED, GIVEN)) == [(TEXT, cost), (NEW, length + 1 - cost + HEAD + 20 + 1 + HEAD)]


def test_a_rewritten_answer_whose_tail_is_the_same() -> None:
    tail = text(40, 5)
    more = follow_up([*REWRITTEN[:6], *tail], text(20, 4))
    causes = charged(more, ASKED, [*GIVEN[:4], *tail])
    assert runs(causes) == [(TEXT, 4), (NEW, 2), (TEXT, 40), (NEW, 1 + HEAD + 20 + 1 + HEAD)]
    assert len({cause.at for cause in causes if cause.reason is TEXT}) == 1, "both lie where the difference is"


def test_reasoning_that_is_dropped_costs_the_answer_behind_it() -> None:
    more = follow_up(text(40, 5), text(20, 4))
    assert runs(charged(more, ASKED, [*text(500, 6), *text(40, 5)])) == [(TEXT, 40), (NEW, 1 + HEAD + 20 + 1 + HEAD)]


def test_the_template_writes_an_earlier_turn_anew() -> None:
    """It puts three tokens before the turn's text; what both have behind them is charged, and the next turn is new."""
    earlier = START.turn("user", text(60, 1), message=7).open()
    more = START.turn("user", [*text(3, 8), *text(60, 1)], message=7).turn("assistant", GIVEN)
    causes = charged(more.turn("user", text(20, 4)).open(), earlier)
    assert runs(causes) == [(NEW, 3), (TEMPLATE, 60 + 1 + HEAD), (NEW, 8 + 1 + HEAD + 20 + 1 + HEAD)]
    edited = START.turn("user", [*text(3, 8), *text(60, 1)]).turn("assistant", GIVEN)
    assert {cause.reason for cause in charged(edited, earlier)} == {NEW, TEXT}, "the client changed the message"


def test_the_template_and_an_image_at_once() -> None:
    question = [*text(60, 1)]
    earlier = START.turn("user", question, message=7).turn("user", Picture("a"), text(50, 2), message=8).open()
    more = START.turn("user", [*text(3, 8), *question], message=7).turn("user", Picture("b"), text(50, 2), message=8)
    assert runs(charged(more.turn("user", text(9, 3)).open(), earlier)) == [
        (NEW, 3),
        (TEMPLATE, 60 + 1 + HEAD),
        (IMAGE, 100 + 50 + 1 + 1),
        (NEW, 1 + 9 + 1 + HEAD),
    ]


def test_an_image_swapped_in_the_middle() -> None:
    def talk(name: str, *more: Part) -> Talk:
        return START.turn("user", text(10, 1), Picture(name), text(5, 2), Picture("kept"), text(300, 3), *more).open()

    (cause,) = charged(talk("b"), talk("a"))
    assert (cause.reason, cause.tokens) == (IMAGE, 100 + 5 + 100 + 300 + 1 + HEAD)
    assert cause.details == {"image": 0, "what": "bytes"}
    assert runs(charged(talk("b", text(40, 4)), talk("a"))) == [(IMAGE, 100 + 5 + 100 + 300), (NEW, 40 + 1 + HEAD)]
    assert runs(charged(talk("b"), START.turn("user", text(10, 1), Picture("a")))) == [
        (IMAGE, 100),
        (NEW, 5 + 100 + 300 + 1 + HEAD),
    ], "what neither had is new"


@pytest.mark.parametrize("length", [40, 250])
def test_an_image_of_another_size_costs_at_most_what_the_other_was(length: int) -> None:
    def talk(image: Picture) -> Talk:
        return START.turn("user", image, text(300, 3)).open()

    rest = (IMAGE, 300 + 1 + HEAD)
    causes = charged(talk(Picture("b", length)), talk(Picture("a")))
    assert causes[0].details == {"image": 0, "what": "size"}
    assert runs(causes) == ([(IMAGE, 40 + rest[1])] if length == 40 else [(IMAGE, 100), (NEW, 150), rest])


def test_two_images_swapped() -> None:
    def talk(first: str, second: str) -> Talk:
        return START.turn("user", Picture(first), text(5, 1), Picture(second), text(50, 2)).open()

    causes = charged(talk("c", "d"), talk("a", "b"))
    assert [(c.reason, c.tokens, c.details["image"]) for c in causes] == [(IMAGE, 105, 0), (IMAGE, 150 + 1 + HEAD, 1)]


def test_a_changed_first_line_of_the_system_prompt() -> None:
    def talk(line: list[int]) -> Talk:
        return Talk().turn("system", line, RULES).turn("user", Picture("a"), text(30, 1)).open()

    rest = len(RULES) + 1 + HEAD + 100 + 30 + 1 + HEAD
    for line in (text(12, 2), text(20, 2), []):
        causes = charged(talk(line), talk(text(12, 3)))
        assert runs(causes) == [(NEW, len(line)), (TEXT, rest)][not line :], "the line itself is new"
        assert causes[-1].at == HEAD


def test_a_changed_word_and_a_new_question() -> None:
    """In one text without turns."""
    earlier, more = Talk([*text(100), 7, *text(500, 1), *text(30, 2)]), Talk([*text(100), 8, *text(500, 1)])
    assert runs(charged(more.add(text(40, 3)), earlier)) == [(NEW, 1), (TEXT, 500), (NEW, 40)]


def test_another_text_before_a_frame_that_recurs_is_new() -> None:
    def talk(question: list[int]) -> Talk:
        return START.turn("user", question, text(MIN_SHARED_TOKENS - HEAD - 2, 9)).open()

    assert {cause.reason for cause in charged(talk(text(300, 1)), talk(text(300, 2)))} == {NEW}


@pytest.mark.parametrize("frame", [1, 20])
def test_a_window_that_slides(frame: int) -> None:
    """The oldest image has gone, so that those behind it are charged; the newest one is new."""

    def talk(*numbers: int) -> Talk:
        parts: list[Part] = []
        for number in numbers:
            parts += [Picture(f"{number}"), text(frame, 99)]
        return START.turn("user", *parts).open()

    first, new = charged(talk(2, 3, 4, 5), talk(1, 2, 3, 4))
    assert (first.reason, first.tokens, first.details["what"]) == (IMAGE, 3 * (100 + frame), "place")
    assert (new.reason, new.tokens) == (NEW, 100 + frame + 1 + HEAD)


def test_an_image_put_before_others() -> None:
    def talk(*names: str) -> Talk:
        return START.turn("user", *map(Picture, names), text(30, 1)).open()

    causes = charged(talk("new", "a", "b"), talk("a", "b"))
    assert runs(causes) == [(NEW, 100), (IMAGE, 200 + 30 + 1 + HEAD)]
    assert runs(charged(talk("b", "a"), talk("a", "b"))) == [(IMAGE, 100), (IMAGE, 100), (IMAGE, 30 + 1 + HEAD)]


def test_documents_in_another_order() -> None:
    def talk(*numbers: int) -> Talk:
        return START.turn("user", *(text(150, number) for number in numbers)).open()

    causes = charged(talk(3, 1, 2, 4), talk(1, 2, 3))
    assert {cause.reason: cause.tokens for cause in causes if cause.reason is NEW} == {NEW: 150 + 1 + HEAD}
    assert sum(cause.tokens for cause in causes if cause.reason is TEXT) == 450


def test_what_the_earlier_request_has_once_is_charged_once() -> None:
    repeated = text(100, 1)
    causes = charged(Talk([8, *repeated, *repeated, *repeated]), Talk([7, *repeated]))
    assert sum(cause.tokens for cause in causes if cause.reason is TEXT) == 100


def test_another_question_behind_the_same_rules_is_new() -> None:
    causes = charged(START.turn("user", text(300, 1)).open(), START.turn("user", text(250, 2)).open(), GIVEN)
    assert runs(causes) == [(NEW, 300 + 1 + HEAD)]


def test_many_differences_are_put_together() -> None:
    """By reason, so that the sums stay right."""
    pieces = [text(30, number) for number in range(200)]
    earlier = Talk([0, *itertools.chain(*([7, *piece] for piece in pieces))])
    causes = charged(Talk([0, *itertools.chain(*([8, *piece] for piece in pieces))]), earlier)
    assert len(causes) == differences.MOST_CAUSES + 2
    for reason, tokens in ((NEW, 200), (TEXT, 200 * 30)):
        assert sum(cause.tokens for cause in causes if cause.reason is reason) == tokens


def test_the_last_that_was_compared_may_still_run() -> None:
    """It has no answer yet, and no notes came with it."""
    earlier = Talk([7, *text(100)])
    earlier.notes = wire.Notes()
    assert runs(charged(Talk([8, *text(100)]), earlier)) == [(NEW, 1), (TEXT, 100)]


Turns = list[tuple[str, list[Part]]]

parts: st.SearchStrategy[Part] = st.one_of(
    st.builds(Picture, st.sampled_from("abc"), st.just(20)),
    st.builds(text, st.integers(1, 60), st.integers(0, 4)),
    st.lists(st.integers(10, 12), max_size=40),
)
turn = st.tuples(st.sampled_from(sorted(ROLES)), st.lists(parts, max_size=4))
turns: st.SearchStrategy[Turns] = st.lists(turn, max_size=5)


def build(given_turns: Turns) -> Talk:
    talk = Talk()
    for role, pieces in given_turns:
        talk = talk.turn(role, *pieces)
    return talk.open()


@given(turns, turns, st.lists(st.integers(10, 12), max_size=30))
def test_causes_of_any_two_prompts(ours: Turns, theirs: Turns, answer: list[int]) -> None:
    check(build(ours), build(theirs), answer)


@given(turns, st.data())
def test_causes_of_an_edited_prompt(shared: Turns, data: st.DataObject) -> None:
    """Turns left out, put in or changed."""
    edited = list(shared)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(edited)))
        edited[at : at + data.draw(st.integers(0, 1))] = data.draw(turns)[:1]
    check(build(edited), build(shared), ())


def check(new: Talk, earlier: Talk, answer: Sequence[int]) -> None:
    causes = charged(new, earlier, answer)  # which asserts that they cover
    start = causes[0].start if causes else len(new.tokens)
    theirs = [*earlier.content(), *answer]
    blamed = sum(cause.tokens for cause in causes if cause.reason is not NEW)
    fresh = sum(cause.tokens for cause in causes if cause.reason is NEW)
    assert fresh + blamed == len(new.tokens) - start
    assert blamed <= len(theirs) - start
    for cause in causes:
        assert start <= cause.at <= cause.start, "the cause lies at its tokens, or before them"
        assert cause.reason in (NEW, TEXT, IMAGE, TEMPLATE)


pieces = st.lists(st.tuples(st.booleans(), st.integers(MIN_SHARED_TOKENS, 90)), min_size=1, max_size=8)


@given(pieces, st.sampled_from(["swap", "insert", "remove"]), st.booleans(), st.integers(1, 90), st.data())
def test_one_change_among_pieces_that_occur_once(
    given_pieces: list[tuple[bool, int]], change: str, is_image: bool, length: int, data: st.DataObject
) -> None:
    """Its cost is known: what stands behind it, and the image that was swapped, up to the size that it had."""
    earlier = [Picture(f"{n}", size) if image else text(size, n + 1) for n, (image, size) in enumerate(given_pieces)]
    at = data.draw(st.integers(0, len(earlier) - 1))
    fresh: list[Part] = [Picture("new", length) if is_image else text(length, 99)] if change != "remove" else []
    behind = earlier[at + (change != "insert") :]
    causes = charged(START.add(*earlier[:at], *fresh, *behind), START.add(*earlier))
    was_image, size = given_pieces[at]
    swapped = min(length, size) if change == "swap" and is_image and was_image else 0
    new = sum(cause.tokens for cause in causes if cause.reason is NEW)
    assert new == (length if fresh else 0) - swapped
    blamed = sum(cause.tokens for cause in causes if cause.reason in (TEXT, IMAGE))
    assert blamed == sum(len(Talk().add(part).tokens) for part in behind) + swapped
