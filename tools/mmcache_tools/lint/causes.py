# SPDX-License-Identifier: Apache-2.0
"""Why two prompts part: take a suspect out of both requests, render again, and see whether the first one holds.

So a cause is named because its removal cures the case, not because a template looks like it. Pure functions over
`Template` and `Request`.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mmcache_tools.lint.conversations import IMAGE_TYPES, Message, Request, texts_of
from mmcache_tools.lint.template import Content, Template, TemplateRefused

THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun"
DATE = re.compile(rf"\d{{1,4}}[-/.:]\d{{1,2}}([-/.:]\d{{1,4}})?|\b({MONTHS})[a-z]*\b|\b\d{{10}}(\d{{3}})?\b")


@dataclass(frozen=True)
class Cause:
    """Why the prefix breaks, and the fix; None where there is none but another template."""

    why: str
    fix: str | None


CAUSES = {
    "first_image": Cause(
        "The first image changes how the template renders what came before it.",
        "Render earlier messages the same with and without images; if the template can't be changed, keep the parts "
        "that it drops (often the system text) out of conversations that may get images.",
    ),
    "string_or_list": Cause(
        "The template renders the same text differently as a string and as a list of parts, and the first image turns "
        "earlier strings into lists.",
        "Send every content as a list of parts from the first message on, or render both forms the same. vLLM hands "
        "over one form always and is not hit.",
    ),
    "dropped_reasoning": Cause(
        "The reasoning of an earlier answer is not rendered again.",
        "Keep the reasoning of earlier turns: send it back, with a template (or a variable of it) that renders it.",
    ),
    "generation_prompt": Cause(
        "What the template adds to open the answer is not what it renders before the same answer on the next turn.",
        "Render answers of earlier turns with what the generation prompt opens.",
    ),
    "clock": Cause(
        "The template writes the date or time of rendering into the prompt.",
        "Pass a fixed date (chat_template_kwargs), or write the date into the newest message.",
    ),
    "date_in_system": Cause(
        "The system text has a date or time in it.",
        "Write the date into the newest message, or round it to what the answers need.",
    ),
    "system_changed": Cause("The system text is another one.", "Keep the system text as it was."),
    "tools_reordered": Cause(
        "The same tools come in another order, or with their keys in another order.",
        "Send the tools in one fixed order, for instance sorted by name.",
    ),
    "tools_changed": Cause(
        "The list of tools is another one.",
        "Keep the list for the whole conversation; forbid a tool by tool_choice instead of leaving it out.",
    ),
    "tools_moved": Cause(
        "The template renders the tools at the last message, so they move with every turn.",
        "Render the tools at the start of the prompt.",
    ),
    "system_moved": Cause(
        "The template renders the system text at the last message, so it moves with every turn.",
        "Render the system text at the start of the prompt.",
    ),
    "whitespace": Cause(
        "White space at the edge of a text is kept in the last message and stripped in earlier ones, or the other way.",
        "Send texts without white space at their edges.",
    ),
    "message_changed": Cause("An earlier message was sent differently this time.", "Only add messages at the end."),
    "message_dropped": Cause(
        "An earlier message was left out.",
        "Drop many old messages at once and seldom, not one with every turn.",
    ),
    "token_boundary": Cause(
        "The text holds, its tokens don't: the end of the earlier prompt merges with what follows.",
        "End the generation prompt with a special token, or with text that does not merge with an answer's start.",
    ),
    "template": Cause("The template renders an earlier message differently once others follow it.", None),
    "refused": Cause("The template refuses these messages; a server answers 400.", None),
}

Edit = Callable[[Request], Request]


def common(first: str | list[int], second: str | list[int]) -> int:
    """How many characters or tokens both begin with."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def diagnose(template: Template, first: Request, second: Request) -> str:
    """The cause that `second`'s prompt does not begin with that of `first`. Raises: TemplateRefused."""
    at = common(template.prompt(first), template.prompt(second))
    if first.tools != second.tools and common(*prompts(template, first, second.with_tools(first.tools))) > at:
        return tools_cause(first, second)
    num = len(first.messages)
    if first.messages != second.messages[:num]:
        healed = second.with_messages([*first.messages, *second.messages[num:]])
        if common(*prompts(template, first, healed)) > at:
            return history_cause(first, second)
    if at >= len(template.prompt(first, generation=False)):
        answer = second.messages[num] if num < len(second.messages) else {}
        return "dropped_reasoning" if reasoning_of(answer) else "generation_prompt"
    return next(
        (name for name, edit in suspects(template, first, second) if holds(template, first, second, edit)), "template"
    )


def prompts(template: Template, *requests: Request) -> list[str]:
    """The text that the template makes of each request, in their order. Raises: TemplateRefused."""
    return [template.prompt(request) for request in requests]


def suspects(template: Template, first: Request, second: Request) -> Iterator[tuple[str, Edit]]:
    """Edits of both requests, by the cause that each takes away."""
    if second.has_images and not first.has_images:
        if template.content == Content.SWITCH:
            yield "string_or_list", lambda request: request.with_messages([as_list(m) for m in request.messages])
        yield "first_image", lambda request: request.with_messages([without_images(m) for m in request.messages])
    yield "dropped_reasoning", lambda request: request.with_messages([without_reasoning(m) for m in request.messages])
    yield "whitespace", lambda request: request.with_messages([stripped(m) for m in request.messages])
    if first.tools:
        yield "tools_moved", lambda request: request.with_tools(None)
    yield (
        "system_moved",
        lambda request: request.with_messages(
            [m for m in request.messages if m["role"] not in ("system", "developer")]
        ),
    )


def holds(template: Template, first: Request, second: Request, edit: Edit) -> bool:
    """Whether `second` begins with the messages of `first` once both are edited."""
    one, other = edit(first), edit(second)
    if (one, other) == (first, second) or not one.messages:
        return False
    try:
        body = len(template.prompt(one, generation=False))
        return common(*prompts(template, one, other)) >= body
    except TemplateRefused:
        return False


def variable_fix(template: Template, first: Request, second: Request) -> dict[str, bool] | None:
    """A switch of the template that makes the first prompt hold, found by trying each, or None."""
    for name in template.variables[:16]:
        for value in (True, False):
            try:
                one, other = (template.prompt(request, kwargs={name: value}) for request in (first, second))
            except TemplateRefused:
                continue
            if name not in template.kwargs and other.startswith(one):
                return {name: value}
    return None


def tools_cause(first: Request, second: Request) -> str:
    """tools_reordered where only the order of tools, or of keys in them, differs; else tools_changed."""

    def sorted_tools(tools: Any) -> list[str]:
        return sorted(json.dumps(tool, sort_keys=True) for tool in tools or ())

    return "tools_reordered" if sorted_tools(first.tools) == sorted_tools(second.tools) else "tools_changed"


def history_cause(first: Request, second: Request) -> str:
    """Why a message of `first` is not the same in `second`."""
    pairs = list(zip(first.messages, second.messages, strict=False))
    index = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if index is None:
        return "message_dropped"  # the later request is shorter
    one, other = pairs[index]
    if is_system(one) and is_system(other):
        return system_cause(one, other)
    if stripped(one) == stripped(other):
        return "whitespace"
    if without_reasoning(one) == without_reasoning(other):
        return "dropped_reasoning"
    if other in first.messages[index + 1 :]:
        return "message_dropped"
    return "message_changed"


def is_system(message: Message) -> bool:
    """Whether the message's role is system, or developer, as newer clients call it."""
    return message["role"] in ("system", "developer")


def system_cause(first: Message, second: Message) -> str:
    """date_in_system where two system texts differ in a date, digits and white space alone; else system_changed."""
    one, other = ("\n".join(texts_of(message)) for message in (first, second))
    masked = [re.sub(r"[\d\s]+|\b[AP]M\b", "", DATE.sub("", text)) for text in (one, other)]
    return "date_in_system" if masked[0] == masked[1] and DATE.search(one) else "system_changed"


def reasoning_of(message: Message) -> bool:
    """Whether the message carries reasoning, in a field of its own or in its text."""
    field = message.get("reasoning") or message.get("reasoning_content")
    return bool(field) or any("</think>" in text for text in texts_of(message))


def edited(message: Message, edit: Callable[[str], str]) -> Message:
    """The message with `edit` applied to each of its texts."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": edit(content)}
    if isinstance(content, list):
        parts = [{**part, "text": edit(part["text"])} if part["type"] == "text" else part for part in content]
        return {**message, "content": parts}
    return message


def without_reasoning(message: Message) -> Message:
    """The message without its reasoning: neither in fields of its own nor in <think> tags in its texts."""
    kept = {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}
    return edited(kept, lambda text: THINKING.sub("", text).lstrip("\n") if "</think>" in text else text)


def stripped(message: Message) -> Message:
    """The message without white space at the edges of its texts."""
    return edited(message, str.strip)


def as_list(message: Message) -> Message:
    """The message with its text as a list of one part; one whose content is no string stays as it is."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def without_images(message: Message) -> Message:
    """The message without its parts of IMAGE_TYPES; one whose content is no list stays as it is."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if part["type"] not in IMAGE_TYPES]}
