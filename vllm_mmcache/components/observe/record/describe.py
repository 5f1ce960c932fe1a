# SPDX-License-Identifier: Apache-2.0
"""Makes a record of what the engine said: segments, and a sentence for every cause. Where records are read; pure."""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

from vllm_mmcache.components.observe.record.digests import shown
from vllm_mmcache.components.observe.record.pending import RequestSnapshot
from vllm_mmcache.components.observe.record.schema import Group, Image, Kind, Miss, Nearest, Reason, Record, Segment
from vllm_mmcache.components.observe.record.wire import Cause, Outcome


class Facts:
    """What both sides say of one request: `asked` the API server, `outcome` the engine."""

    def __init__(self, asked: RequestSnapshot, outcome: Outcome, answers: Container[tuple[str, int]]) -> None:
        self.asked, self.outcome = asked, outcome
        self.causes = [self._judged(cause, answers) for cause in outcome.causes]

    @property
    def num_parts(self) -> int:
        """Segments and misses, about; a text between two images is one more."""
        return len(self.asked.turns) + 2 * len(self.asked.spans) + 1 + len(self.causes)

    def source(self, image: int) -> str:
        """Where the features of an image came from."""
        offset, length, _ = self.asked.spans[image]
        not_needed = offset + length <= self.outcome.reused_tokens
        return self.outcome.features.get(image) or ("not_needed" if not_needed else "encoder_cache")

    def images_by_source(self) -> dict[str, int]:
        """How many images had their features from where."""
        return Counter(map(self.source, range(len(self.asked.spans))))

    def _judged(self, cause: Cause, answers: Container[tuple[str, int]]) -> Cause:
        """Whether an answer was changed or came back as it was given, the engine can't know."""
        if cause.details.get("answer") and self.asked.is_echo(cause.details["turn"], answers):
            return cause._replace(reason=Reason.TEMPLATE_REWROTE)
        return cause


def describe(facts: Facts, server: str, model: str) -> Record:
    """The record of one request."""
    asked, outcome = facts.asked, facts.outcome
    spans = _spans(facts)
    starts = [span[0] for span in spans]
    misses = []
    for reason, start, tokens, at, details in facts.causes:
        segment = max(bisect_right(starts, at) - 1, 0)
        token = at - starts[segment]
        text = _sentence(reason, outcome, at, _name(spans, segment), token, details)
        misses.append(
            Miss(
                reason=reason,
                start=start,
                tokens=tokens,
                text=text,
                segment=segment,
                token=token,
                details=details,
            )
        )
    return Record(
        id=outcome.id,
        request_id=asked.request_id,
        time_s=asked.time_s,
        server=server,
        engine=outcome.engine,
        model=model,
        lora=asked.lora or None,
        salt=shown(asked.salt) if asked.salt else None,
        prompt_tokens=asked.prompt_tokens,
        reused_tokens=outcome.reused_tokens,
        external_tokens=outcome.external_tokens,
        block_tokens=outcome.block_tokens,
        groups=tuple(
            Group(index=index, kind=kind, block_tokens=size, hit_tokens=hit, vetoed=vetoed)
            for index, kind, size, hit, vetoed in outcome.groups
        ),
        nearest=_nearest(outcome),
        segments=tuple(
            _segment(index, span, outcome.reused_tokens, misses) for index, span in enumerate(spans)
        ),
        misses=tuple(misses),
    )  # fmt: skip


Span = tuple[int, int, Kind, str | None, int | None, Image | None]  # start, end, kind, role, turn, image


def _spans(facts: Facts) -> list[Span]:
    """The prompt, cut at turns and images."""
    asked = facts.asked
    images = {offset: index for index, (offset, _, _) in enumerate(asked.spans)}
    ends = [offset + length for offset, length, _ in asked.spans]
    cuts = sorted({0, asked.prompt_tokens, *asked.turns, *images, *ends})
    spans: list[Span] = []
    for start, end in itertools.pairwise(cuts):
        turn = bisect_right(asked.turns, start) - 1
        role = (asked.roles[turn] or None) if turn >= 0 else None
        image = _image(facts, images[start]) if start in images else None
        kind: Kind = "image" if image else _kind(asked, turn, role)
        spans.append((start, end, kind, role, turn if turn >= 0 else None, image))
    return spans


def _image(facts: Facts, index: int) -> Image:
    width, height, *layers = facts.asked.layers[index]
    happened: dict[str, Any] = dict(zip(("body", "decode", "processor"), layers, strict=True))
    happened["features"] = facts.source(index)
    name = shown(facts.asked.spans[index][2])
    return Image(index=index, digest=name, width=width or None, height=height or None, **happened)


def _kind(asked: RequestSnapshot, turn: int, role: str | None) -> Kind:
    if not asked.turns:
        return "text"
    if role == "system" or turn < 0:
        return "system"
    return "generation" if role == "assistant" and turn == len(asked.turns) - 1 else "message"


def _segment(index: int, span: Span, reused: int, misses: Sequence[Miss]) -> Segment:
    start, end, kind, role, turn, image = span
    got = max(0, min(reused, end) - start)
    overlaps = [min(m.start + m.tokens, end) - max(m.start, start) for m in misses]
    most = max(range(len(overlaps)), key=overlaps.__getitem__) if got < end - start and overlaps else None
    return Segment(
        index=index, kind=kind, role=role, turn=turn, start=start, tokens=end - start, reused_tokens=got,
        miss=most, image=image,
    )  # fmt: skip


def _nearest(outcome: Outcome) -> Nearest | None:
    if outcome.nearest is None:
        return None
    name, age_s, common, same_salt, same_lora = outcome.nearest
    return Nearest(id=name, age_s=age_s, common_tokens=common, same_salt=same_salt, same_lora=same_lora)


def _name(spans: Sequence[Span], index: int) -> str:
    _, _, kind, role, turn, image = spans[index]
    if image is not None:
        return f"image {image.index}"
    if kind == "generation":
        return "the opening of the answer"
    if kind == "message":
        return f"turn {turn}" + (f" ({role})" if role else "")
    return "the system text" if kind == "system" else "the text"


def _sentence(reason: Reason, outcome: Outcome, at: int, where: str, token: int, details: dict[str, Any]) -> str:
    nearest, _, common, *_ = outcome.nearest or ("an earlier request", 0.0, 0)
    other = details.get("other") or nearest
    place = f"token {token} of {where}"
    match reason:
        case Reason.NEW_CONTENT if outcome.nearest is None:
            return "New: no remembered request begins like this one."
        case Reason.NEW_CONTENT if at > common:
            return f"New from {place} on: {other} has no such content there."
        case Reason.NEW_CONTENT:
            return f"New from {place} on; up to there {other} is the same."
        case Reason.TEXT_DIFFERS if details.get("answer"):
            return f"The answer of {other} was sent back with another text, from {place} on."
        case Reason.TEXT_DIFFERS:
            return f"The text differs from {other} at {place}; what both have behind it must be computed again."
        case Reason.IMAGE_DIFFERS if details["what"] == "place":
            return f"Images were added, removed or moved since {other}, from {place} on; others follow as before."
        case Reason.IMAGE_DIFFERS:
            what = {"bytes": "other bytes", "size": "another size", "settings": "other processor settings"}
            return f"Image {details['image']} has {what[str(details['what'])]} than the one of {other} at its place."
        case Reason.TEMPLATE_REWROTE if details.get("answer"):
            return (
                f"The answer of {other} came back as it was given, but is written in other tokens, from {place} on: "
                "the template leaves something out (reasoning, for instance), or its text has other tokens."
            )
        case Reason.TEMPLATE_REWROTE:
            return (
                f"The messages up to here are those of {other}, but the template wrote them otherwise, from {place} on."
            )
        case Reason.BLOCK_TAIL:
            return f"Only whole blocks of {details['block_tokens']} tokens are kept; this one was not full."
        case Reason.LAST_TOKEN:
            return (
                "All of the prompt is known; its last block is computed all the same, to have something to answer from."
            )
        case Reason.EVICTED:
            group = f"The {details['kind']} state of group {details['group']}" if "kind" in details else "It"
            if details.get("how") == "reset":
                return f"{group} was cached until the prefix cache was reset {details['ago_s']:.1f} s before."
            when = f" {details['ago_s']:.1f} s before" if "ago_s" in details else ""
            return f"{group} was cached for {other}, and evicted{when}."
        case Reason.STATE_NOT_KEPT:
            return (
                f"Group {details['group']} ({details['kind']}) kept no state behind token {at}, where others have the "
                f"prompt up to token {details['others_hit_tokens']}."
            )
        case Reason.NOT_YET_COMPUTED:
            return f"{other} has the same content, but had not computed it yet."
        case Reason.OTHER_SALT:
            return f"{other} has the same content under another cache_salt."
        case Reason.OTHER_LORA:
            return f"{other} has the same content under another LoRA adapter ({details['was'] or 'none'})."
        case Reason.CACHING_OFF:
            by = {
                "server": "Prefix caching is off on this server.",
                "prompt_logprobs": "The request asks for prompt_logprobs, for which every token is computed.",
                "pooling": "The pooling task reads no prefix cache.",
            }
            return by.get(str(details["by"]), "The request asks not to read the prefix cache.")
        case Reason.UNEXPLAINED:
            return "None of the reasons that are known."
