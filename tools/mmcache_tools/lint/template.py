# SPDX-License-Identifier: Apache-2.0
"""A chat template with what belongs to it (special tokens, tokenizer), rendered as a server renders it.

Transformers compiles it, in its sandbox. `Content` says in which form the template sees the messages: as vLLM hands
them over (always lists of parts where the template reads parts, else always strings), as they were sent, or as servers
do that turn every string into a list with the first image.
"""

import copy
import enum
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from mmcache_tools.lint.conversations import IMAGE_TYPES, Message, Request, texts_of
from vllm_mmcache.base.errors import LintError

# vLLM writes the model's own placeholder; for a comparison any text does that no prompt has.
IMAGE_TEXT = "<image>"
STANDARD = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"})
NOW = datetime(2026, 3, 4, 5, 6, 7)


class Content(enum.StrEnum):
    """In which form the template sees `content`."""

    VLLM = "vllm"
    AS_SENT = "as-sent"
    SWITCH = "switch"


class TemplateRefused(Exception):
    """The template refuses these messages; a server answers 400."""


class Template:
    """One chat template. Rendering is deterministic: its clock stands still unless `now` is given."""

    def __init__(
        self,
        text: str,
        special_tokens: dict[str, str] | None = None,
        tokens: Callable[[str], list[int]] | None = None,
        kwargs: dict[str, Any] | None = None,
        content: Content = Content.VLLM,
    ) -> None:
        """Raises: LintError for a template that does not compile."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils import chat_template_utils

        self.text = text
        self.special_tokens = special_tokens or {}
        self.tokens = tokens
        self.kwargs = kwargs or {}
        self.content = content
        self._render = chat_template_utils.render_jinja_template
        try:
            names = chat_template_utils._get_template_variables(text)
        except TemplateSyntaxError as error:
            raise LintError(f"the chat template does not compile: line {error.lineno}: {error.message}") from None
        self.variables = sorted(names - STANDARD - set(self.special_tokens))
        self.reads_parts = self._reads_parts()

    def prompt(
        self, request: Request, *, generation: bool = True, now: datetime = NOW, kwargs: dict[str, Any] | None = None
    ) -> str:
        """The prompt's text. Raises: TemplateRefused."""
        as_list = {
            Content.VLLM: self.reads_parts,
            Content.AS_SENT: None,
            Content.SWITCH: request.has_images or None,
        }[self.content]
        return self.render(
            [in_form(message, as_list) for message in request.messages], request.tools, generation, now, kwargs
        )

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        generation: bool = True,
        now: datetime = NOW,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Messages as the template sees them, rendered. Raises: TemplateRefused."""
        try:
            rendered, _ = self._render(
                conversations=[copy.deepcopy(messages)],
                tools=copy.deepcopy(tools),
                chat_template=self.text,
                add_generation_prompt=generation,
                strftime_now=now.strftime,
                **{**self.special_tokens, **self.kwargs, **(kwargs or {})},
            )
        except Exception as error:  # a template may raise anything: its own refusals, and what Python makes of its bugs
            raise TemplateRefused(f"{type(error).__name__}: {error}") from None
        return str(rendered[0])

    def units(self, text: str) -> list[int] | str:
        """What the cache pays for: token ids where there is a tokenizer, else characters."""
        return self.tokens(text) if self.tokens else text

    @property
    def unit(self) -> str:
        """What `units` counts, in words: tokens, or characters without a tokenizer."""
        return "tokens" if self.tokens else "characters"

    def _reads_parts(self) -> bool:
        probe = "mmcacheprobe"
        try:
            seen = self.render([{"role": "user", "content": [{"type": "text", "text": probe}]}])
        except TemplateRefused:
            return False
        return probe in seen and "'text'" not in seen and '"text"' not in seen


def in_form(message: Message, as_list: bool | None) -> Message:
    """The message as vLLM or another server hands it to the template; None leaves `content` as it was sent."""
    made = dict(message)
    if isinstance(reasoning := message.get("reasoning", message.get("reasoning_content")), str):
        made["reasoning"] = made["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [with_object(call) for call in calls]
    else:
        made.pop("tool_calls", None)
    content = message.get("content")
    if as_list and isinstance(content, str):
        made["content"] = [{"type": "text", "text": content}]
    elif as_list is False and isinstance(content, list):
        images = [IMAGE_TEXT for part in content if part["type"] in IMAGE_TYPES]
        made["content"] = "\n".join([*images, *texts_of(message)])
    elif as_list and isinstance(content, list):
        made["content"] = [{"type": "image"} if part["type"] in IMAGE_TYPES else part for part in content]
    return made


def with_object(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates expect them; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str | None):
        return call
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def load(
    place: Path, tokenizer: Path | None = None, kwargs: dict[str, Any] | None = None, content: Content = Content.VLLM
) -> Template:
    """The template of a file or of a model directory; `tokenizer` is a directory or a tokenizer.json.

    Raises: LintError where there is none.
    """
    directory = place if place.is_dir() else None
    config = read_json(directory / "tokenizer_config.json") if directory else {}
    text = template_of(directory, config) if directory else read_text(place)
    beside = tokenizer or directory
    if beside is not None and tokenizer is not None and not directory:
        config = read_json((beside if beside.is_dir() else beside.parent) / "tokenizer_config.json")
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return Template(text, special, tokenizer_of(beside, required=tokenizer is not None), kwargs, content)


def template_of(directory: Path, config: dict[str, Any]) -> str:
    """Where Transformers looks, in its order: chat_template.jinja, chat_template.json, tokenizer_config.json."""
    if (directory / "chat_template.jinja").exists():
        return read_text(directory / "chat_template.jinja")
    given = read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(given, list):  # named templates
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}.get("default")
    if not isinstance(given, str):
        raise LintError(
            f"{directory}: no chat template in it: expected chat_template.jinja, or chat_template in "
            "chat_template.json or tokenizer_config.json; or name a template's file"
        )
    return given


def tokenizer_of(place: Path | None, required: bool) -> Callable[[str], list[int]] | None:
    """Text to token ids by a tokenizer.json, or None where there is none. Raises: LintError where one was asked for."""
    path = place / "tokenizer.json" if place is not None and place.is_dir() else place
    if path is None or not path.exists():
        if required:
            raise LintError(f"{path}: no such tokenizer: give a tokenizer.json, or a directory that has one")
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise LintError(f"{path}: no tokenizer: {error}") from None

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return tokens


def read_text(path: Path) -> str:
    """Raises: LintError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise LintError(f"{path}: {reason}: give a chat template's file, or a model directory") from None


def read_json(path: Path) -> dict[str, Any]:
    """An object of a file, {} where there is no such file. Raises: LintError."""
    if not path.exists():
        return {}
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise LintError(f"{path}: malformed JSON: {error}") from None
    return found if isinstance(found, dict) else {}
