# SPDX-License-Identifier: Apache-2.0
"""Conversations as JSON lines, and the requests that a client sends in their course. No template, no tokenizer.

A line is a list of OpenAI messages, or an object with `messages` and, where there are any, `tools`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_mmcache.base.errors import LintError

Message = dict[str, Any]

IMAGE_TYPES = frozenset({"image", "image_url", "input_image", "image_pil", "image_embeds"})


@dataclass(frozen=True)
class Request:
    """What one turn sends: the messages before an answer. line and turn count from 1."""

    line: int
    turn: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def has_images(self) -> bool:
        """Whether a message has a part of IMAGE_TYPES."""
        return any(images_of(message) for message in self.messages)

    def with_messages(self, messages: list[Message]) -> "Request":
        """The same turn with these messages in place of its own."""
        return replace(self, messages=messages)

    def with_tools(self, tools: list[dict[str, Any]] | None) -> "Request":
        """The same turn with these tools in place of its own."""
        return replace(self, tools=tools)


def read(path: Path) -> list[list[Request]]:
    """The requests of every conversation in `path` (`-` is standard input), in their order.

    Raises: LintError with the line's number for what is no conversation.
    """
    name = "standard input" if str(path) == "-" else str(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error.reason})"
        raise LintError(f"{name}: {reason}: give a file of conversations, one a line") from None
    found = [
        list(requests_of(number, *conversation(f"{name}:{number}", line)))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not found:
        raise LintError(f"{name}: no conversation in it: expected one a line, as JSON")
    return found


def conversation(where: str, line: str) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages and tools of one line. Raises: LintError that says where and what was expected."""
    try:
        given = json.loads(line)
    except ValueError as error:
        at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise LintError(f"{where}: malformed JSON{at}; expected one whole conversation on each line") from None
    messages = given.get("messages") if isinstance(given, dict) else given
    tools = given.get("tools") if isinstance(given, dict) else None
    if not isinstance(messages, list) or not messages:
        raise LintError(f'{where}: expected a list of messages, or an object with "messages"')
    for index, message in enumerate(messages):
        if problem := wrong_with(message):
            raise LintError(f"{where}: message {index}: {problem}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise LintError(f'{where}: "tools" is no list of objects')
    return messages, tools or None


def wrong_with(message: Any) -> str | None:
    """What makes `message` no OpenAI message, or None."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return 'expected an object with a "role"'
    content = message.get("content")
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return '"content" is neither a text nor a list of parts'
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            return 'a part of "content" is no object with a "type"'
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            return 'a part of type "text" has no "text"'
    return None


def requests_of(line: int, messages: list[Message], tools: list[dict[str, Any]] | None) -> Iterator[Request]:
    """One request for each answer in the conversation, and one for what waits for an answer at its end."""
    turn = 0
    for index, message in enumerate([*messages, {"role": "assistant"}]):
        asked = index > 0 and messages[index - 1]["role"] != "assistant"
        if message["role"] == "assistant" and asked:
            turn += 1
            yield Request(line, turn, messages[:index], tools)


def images_of(message: Message) -> int:
    """How many images the message has."""
    content = message.get("content")
    return sum(part["type"] in IMAGE_TYPES for part in content) if isinstance(content, list) else 0


def texts_of(message: Message) -> list[str]:
    """The message's texts, part by part."""
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [content] if content else []
