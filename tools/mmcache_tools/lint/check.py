# SPDX-License-Identifier: Apache-2.0
"""Goes through conversations turn by turn and collects where a prompt does not begin with the one before it.

Three kinds of pairs are compared: consecutive turns of a conversation; the first prompts of consecutive conversations,
of which the system text and the tools should be the same; and, with `as_requests`, consecutive lines.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from mmcache_tools.lint.causes import (
    CAUSES,
    common,
    diagnose,
    is_system,
    prompts,
    system_cause,
    tools_cause,
    variable_fix,
)
from mmcache_tools.lint.conversations import Request, images_of, texts_of
from mmcache_tools.lint.template import NOW, Template, TemplateRefused

CONTEXT = 32  # characters shown before and after the place where two prompts part


@dataclass(frozen=True)
class Finding:
    """One place where the cache breaks. position and lost count `unit`; message counts from 0.

    lost: what the earlier prompt had after `position`, so what is computed again though nothing of it is new. The
    answer comes on top, and the placeholders of `images_lost` images count as one each.
    """

    line: int
    turn: int
    next_line: int
    next_turn: int
    cause: str
    why: str
    fix: str | None
    message: int | None
    position: int
    lost: int
    images_lost: int
    unit: str
    before: str
    was: str
    now: str


@dataclass(frozen=True)
class Report:
    """All findings; prompts and lost are sums over the requests that have an earlier one, in `unit`."""

    requests: int
    pairs: int
    unit: str
    prompt: int
    lost: int
    findings: list[Finding]

    def as_json(self) -> dict[str, Any]:
        """The fields by their names, each finding an object: what `mmcache lint --json` prints."""
        return asdict(self)


def check(template: Template, conversations: list[list[Request]], as_requests: bool = False) -> Report:
    """Compare every request with the one before it; `as_requests` takes the lines as requests of one conversation."""
    if as_requests:
        conversations = [[requests[-1] for requests in conversations if requests]]
    first_ones = [requests[0] for requests in conversations if requests]
    findings: list[Finding] = []
    prompt = num_pairs = 0
    for first, second in itertools.chain.from_iterable(map(itertools.pairwise, conversations)):
        num_pairs += 1
        try:
            prompt += len(template.units(template.prompt(second)))
            findings += turn_findings(template, first, second)
        except TemplateRefused as refusal:
            findings.append(refused(template, first, second, refusal))
    for request in first_ones:
        try:
            template.prompt(request)
        except TemplateRefused as refusal:
            findings.append(refused(template, request, request, refusal))
    findings += clock_findings(template, first_ones[:1])
    findings += preamble_findings(template, first_ones)
    findings.sort(key=lambda finding: (finding.line, finding.turn))
    lost = sum(finding.lost for finding in findings)
    num_requests = sum(map(len, conversations))
    return Report(num_requests, num_pairs, template.unit, prompt, lost, findings)


def turn_findings(template: Template, first: Request, second: Request) -> Iterator[Finding]:
    """At most one: where the second prompt does not begin with the first one's text, or else its tokens.

    Raises: TemplateRefused.
    """
    one, other = prompts(template, first, second)
    if not other.startswith(one):
        fixed = variable_fix(template, first, second)
        yield finding(template, first, second, diagnose(template, first, second), one, other, switch=fixed)
    elif template.tokens and common(template.tokens(one), template.tokens(other)) < len(template.tokens(one)):
        yield finding(template, first, second, "token_boundary", one, other)


def clock_findings(template: Template, requests: list[Request]) -> Iterator[Finding]:
    """The template's own clock, one minute and one day later."""
    for request in requests:
        for later in (timedelta(minutes=1), timedelta(days=1)):
            try:
                one, other = template.prompt(request), template.prompt(request, now=NOW + later)
            except TemplateRefused:
                return
            if one != other:
                when = "every minute or less" if later < timedelta(days=1) else "once a day"
                yield finding(template, request, request, "clock", one, other, note=f"It changes {when}.")
                return


def preamble_findings(template: Template, requests: list[Request]) -> Iterator[Finding]:
    """System text and tools, which conversations of one application share."""
    for first, second in itertools.pairwise(requests):
        try:
            one, other = prompts(template, first, second)
            if (first.tools and second.tools and first.tools != second.tools) or json_differs(first, second):
                healed = template.prompt(second.with_tools(first.tools))
                if tools_cause(first, second) == "tools_reordered" and common(one, healed) > common(one, other):
                    yield finding(template, first, second, "tools_reordered", one[: common(one, healed)], other)
            systems = [request.messages[0] for request in (first, second)]
            if systems[0] != systems[1] and all(map(is_system, systems)):
                healed = template.prompt(second.with_messages([systems[0], *second.messages[1:]]))
                if system_cause(*systems) == "date_in_system" and common(one, healed) > common(one, other):
                    yield finding(template, first, second, "date_in_system", one[: common(one, healed)], other)
        except TemplateRefused:
            continue


def json_differs(first: Request, second: Request) -> bool:
    """Whether equal tools have their keys in another order."""
    return json.dumps(first.tools) != json.dumps(second.tools)


def finding(
    template: Template,
    first: Request,
    second: Request,
    cause: str,
    one: str,
    other: str,
    note: str = "",
    switch: dict[str, bool] | None = None,
) -> Finding:
    """The finding for the prompts `one`, as far as it should be found again, and `other`."""
    at = common(one, other)
    units = template.units(one)
    position = common(units, template.units(other))
    message, images_lost = place(first, one, at)
    fix = CAUSES[cause].fix
    if switch:
        fix = f"chat_template_kwargs {json.dumps(switch)} cures it, where the model is meant to run so."
    return Finding(
        line=first.line,
        turn=first.turn,
        next_line=second.line,
        next_turn=second.turn,
        cause=cause,
        why=" ".join(filter(None, [CAUSES[cause].why, note])),
        fix=fix,
        message=None if cause in ("generation_prompt", "clock") else message,
        position=position,
        lost=len(units) - position,
        images_lost=images_lost,
        unit=template.unit,
        before=one[max(0, at - CONTEXT) : at],
        was=one[at : at + CONTEXT],
        now=other[at : at + CONTEXT],
    )


def refused(template: Template, first: Request, second: Request, refusal: TemplateRefused) -> Finding:
    """The finding for a request that the template refuses; of what is lost nothing is known, so it counts 0."""
    why = f"{CAUSES['refused'].why} It says: {refusal}"
    where = (first.line, first.turn, second.line, second.turn)
    return Finding(*where, "refused", why, None, None, 0, 0, 0, template.unit, "", "", "")


def place(request: Request, prompt: str, at: int) -> tuple[int | None, int]:
    """The message that the character `at` of the prompt belongs to, and how many images come after it.

    Messages are found by their texts, in order; one that the template does not render as it is, is passed over.
    """
    cursor, found = 0, None
    images_lost = 0
    for index, message in enumerate(request.messages):
        start = cursor
        for text in filter(None, map(str.strip, texts_of(message))):
            if (hit := prompt.find(text, cursor)) >= 0:
                start, cursor = min(hit, start) if start > hit else hit, hit + len(text)
        if start <= at:
            found = index
        if start > at or (cursor > at and images_of(message)):
            images_lost += images_of(message)
    return found, images_lost
