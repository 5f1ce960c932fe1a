# SPDX-License-Identifier: Apache-2.0
"""What differences from an earlier request cost, and what is new: the part of a prompt that is not known.

A difference is charged with the tokens that would have been reused without it: those that stand in the place of the
earlier request's, as many as that has there, and those that both have behind it, up to the next difference. Text that
the client put in the place of another is new. Scheduler thread; pure, and linear in the tokens.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_mmcache.components.observe.record import wire
from vllm_mmcache.components.observe.record.history import Entry
from vllm_mmcache.components.observe.record.resync import Place, Resync
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.components.observe.record.wire import Cause

MOST_CAUSES = 32  # that are told one by one; those behind them are put together by reason


class _Difference(NamedTuple):
    """A difference, and where the prompt goes on behind what stands in the place of something else."""

    reason: Reason
    details: dict[str, Any]
    onward: Place
    in_place: bool = False
    """Whether all up to `onward` stands in the place of what the earlier request has up to there."""


def behind(prompt: Entry, earlier: Entry | None, start: int) -> list[Cause]:
    """Why each token from `start` on is not known to be that of the nearest earlier request, in the prompt's order.

    Tokens that are the same again after a difference have the difference's reason: they are computed because of it.
    """
    if earlier is None or start >= earlier.total:
        return [Cause(Reason.NEW_CONTENT, start, prompt.prompt_tokens - start, start, {})]
    ours, theirs = _Side.of(prompt, prompt.prompt_tokens), _Side.of(earlier, earlier.total)
    tokens, their_tokens = prompt.slice(start, ours.total), earlier.slice(start, theirs.total)
    resync = Resync(start, tokens, their_tokens, ours.notes.spans, theirs.notes.spans)
    causes: list[Cause] = []
    place = Place(start, start)
    while place.ours < ours.total:
        found = _difference(ours, theirs, place, resync.next(place))
        if found is None:
            break
        at, (reason, details, onward, in_place) = place.ours, found
        replaced = min(onward.ours - at, onward.theirs - place.theirs) if in_place else 0
        replaced = resync.take(place, replaced)  # what another difference has taken is not charged twice
        same = resync.go_on(onward)
        _add(causes, Cause(reason, at, replaced, at, details))
        _add(causes, Cause(Reason.NEW_CONTENT, at + replaced, onward.ours - at - replaced, at + replaced, {}))
        _add(causes, Cause(reason, onward.ours, same, at, details))
        place = Place(onward.ours + same, onward.theirs + same)
    _add(causes, Cause(Reason.NEW_CONTENT, place.ours, ours.total - place.ours, place.ours, {}))
    return _bounded(causes)


@dataclass(frozen=True)
class _Side:
    """One of the two requests. Positions are in tokens from its beginning."""

    notes: wire.Notes
    total: int
    offsets: list[int]
    """Where its images begin."""

    @classmethod
    def of(cls, entry: Entry, total: int) -> "_Side":
        notes = wire.read_notes(entry.notes)
        return cls(notes, total, [offset for offset, _, _ in notes.spans])

    def image_at(self, at: int) -> int | None:
        """The number of the image that begins at `at`, or that `at` lies in."""
        index = bisect_right(self.offsets, at) - 1
        return index if index >= 0 and at < self.image_end(index) else None

    def image_end(self, index: int) -> int:
        offset, length, _ = self.notes.spans[index]
        return offset + length

    def has_image(self, start: int, end: int) -> bool:
        """Whether an image begins there."""
        return bisect_left(self.offsets, start) < bisect_left(self.offsets, end)

    def turn_at(self, at: int) -> int:
        """The turn that `at` lies in; -1 before the first."""
        return bisect_right(self.notes.turns, at) - 1

    def turn_end(self, at: int) -> int:
        return next(iter(self.notes.turns[self.turn_at(at) + 1 :]), self.total)


def _difference(ours: _Side, theirs: _Side, place: Place, same: Place | None) -> _Difference | None:
    """What the difference at `place` is. same: where the two have the same again, by content; None where nowhere."""
    at, their_at = place
    now, then = ours.notes, theirs.notes
    end, their_end = same or (ours.total, theirs.total)
    is_moved = their_end < their_at
    if is_moved:
        their_end = theirs.total
    image, their_image = ours.image_at(at), theirs.image_at(their_at)
    if image is not None and their_image is not None:
        onward = Place(ours.image_end(image), theirs.image_end(their_image))
        if onward.ours <= end and onward.theirs <= their_end:
            details = {"image": image, "what": _what_differs(now.images[image], then.images[their_image])}
            return _Difference(Reason.IMAGE_DIFFERS, details, onward, in_place=True)
    elif image is None and their_image is None and then.turns and their_at < theirs.total:
        turn = ours.turn_at(at)
        onward = Place(min(ours.turn_end(at), end), min(theirs.turn_end(their_at), their_end))
        if their_at > then.turns[-1]:
            if 0 <= turn < len(now.roles) - 1 and now.roles[turn] == "assistant":
                return _Difference(Reason.TEXT_DIFFERS, {"turn": turn, "answer": True}, onward, in_place=True)
        elif turn >= 0 and then.messages and then.messages == now.messages[: len(then.messages)]:
            return _Difference(Reason.TEMPLATE_REWROTE, {"turn": turn}, onward, in_place=True)
    if same is None:
        return None
    if (
        (end == at and theirs.has_image(their_at, their_end))  # removed
        or (their_end == their_at and ours.has_image(at, end))  # added
        or (is_moved and ours.image_at(end) is not None)
    ):
        return _Difference(Reason.IMAGE_DIFFERS, {"what": "place"}, same)
    return _Difference(Reason.TEXT_DIFFERS, {}, same)


def _what_differs(ours: tuple[str, str, int, int], theirs: tuple[str, str, int, int]) -> str:
    (content, settings, *size), (their_content, their_settings, *their_size) = ours, theirs
    if content and their_content:
        if content == their_content:
            return "settings"
    elif settings != their_settings and size == their_size:
        return "settings"
    return "bytes" if size == their_size else "size"


def _add(causes: list[Cause], cause: Cause) -> None:
    """Add a cause, or its tokens to the one before if that is the same."""
    if not cause.tokens:
        return
    last = causes[-1] if causes else None
    is_new = cause.reason is Reason.NEW_CONTENT
    if last and last.reason is cause.reason and (is_new or last.at == cause.at):
        causes[-1] = last._replace(tokens=last.tokens + cause.tokens)
    else:
        causes.append(cause)


def _bounded(causes: list[Cause]) -> list[Cause]:
    """At most MOST_CAUSES, and one more for each reason, which has the tokens of all further ones with this reason."""
    told, rest = causes[:MOST_CAUSES], causes[MOST_CAUSES:]
    for reason in dict.fromkeys(cause.reason for cause in rest):
        group = [cause for cause in rest if cause.reason is reason]
        start = told[-1].start + told[-1].tokens
        told.append(group[0]._replace(start=start, tokens=sum(cause.tokens for cause in group)))
    return told
