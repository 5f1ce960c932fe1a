# SPDX-License-Identifier: Apache-2.0
"""Which places of a request hold images that vLLM opens as images, by endpoint. Pure: parsed JSON in, strings out.

Everything that is not listed may be text to somebody (a tool's schema, a document of a template, an argument), and
stays as it is, byte for byte. A place is listed only if vLLM hands its value to its image loader and to nobody else.
"""

from collections.abc import Callable, Iterator
from typing import Any


class Lists:
    """Lets a walk look at lists as long as they have no more than `limit` elements, all of them together.

    Raises: TooManyElements in place of the list that is too much, before anybody has looked at it.
    """

    def __init__(self, limit: int) -> None:
        self._left = limit

    def __call__(self, value: Any) -> list[Any]:
        """`value` if it is a list; else an empty one."""
        if not isinstance(value, list):
            return []
        self._left -= len(value)
        if self._left < 0:
            raise TooManyElements
        return value

    def dicts(self, value: Any) -> list[dict[str, Any]]:
        """Those elements that are dicts."""
        return [item for item in self(value) if isinstance(item, dict)]


class TooManyElements(Exception):
    """Looking at all of them would take longer than vLLM takes to parse them."""


Walker = Callable[[dict[str, Any], Lists], Iterator[str]]


def _strings(*values: Any) -> Iterator[str]:
    return (value for value in values if isinstance(value, str))


def _parts(content: Any, lists: Lists) -> Iterator[str]:
    """Content parts of OpenAI's kind: chat completions and responses."""
    for part in lists.dicts(content):
        if part.get("type") in (None, "image_url", "input_image"):
            image = part.get("image_url")
            yield from _strings(image.get("url") if isinstance(image, dict) else image)


def _chat(request: dict[str, Any], lists: Lists) -> Iterator[str]:
    for message in lists(request.get("messages")):
        for one in lists(message) if isinstance(message, list) else [message]:  # a batch holds conversations
            if isinstance(one, dict):
                yield from _parts(one.get("content"), lists)


def _responses(request: dict[str, Any], lists: Lists) -> Iterator[str]:
    if request.get("enable_response_messages"):
        return  # the answer repeats the input
    for item in lists.dicts(request.get("input")):
        if item.get("type") in (None, "message"):
            yield from _parts(item.get("content"), lists)
        elif item["type"] == "function_call_output":
            yield from _parts(item.get("output"), lists)


def _anthropic(request: dict[str, Any], lists: Lists) -> Iterator[str]:
    for message in lists.dicts(request.get("messages")):
        yield from _blocks(message.get("content"), message.get("role") == "user", lists)


def _blocks(content: Any, of_user: bool, lists: Lists) -> Iterator[str]:
    for block in lists.dicts(content):
        source = block.get("source")
        if block.get("type") == "image" and isinstance(source, dict) and source.get("type") == "base64":
            yield from _strings(source.get("data"))
        elif block.get("type") == "tool_result" and of_user:  # of others, vLLM makes text of it
            yield from _blocks(block.get("content"), False, lists)


def _embed(request: dict[str, Any], lists: Lists) -> Iterator[str]:
    yield from _images(request, lists)
    for item in lists.dicts(request.get("inputs")):
        yield from _parts(item.get("content"), lists)


def _images(request: dict[str, Any], lists: Lists) -> Iterator[str]:
    yield from _strings(*lists(request.get("images")))


def _score(request: dict[str, Any], lists: Lists) -> Iterator[str]:
    for key in ("data_1", "data_2", "queries", "documents", "items", "text_1", "text_2"):
        value = request.get(key)
        for one in lists(value) if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield from _parts(one.get("content"), lists)


def _generate(request: dict[str, Any], lists: Lists) -> Iterator[str]:
    for part in lists.dicts(request.get("content_parts")):
        if part.get("type") == "image_url":
            yield from _strings(part.get("url"))


# Not listed: rerank, whose answer repeats the documents.
WALKERS: dict[str, Walker] = {
    "/v1/chat/completions": _chat,
    "/v1/chat/completions/batch": _chat,
    "/v1/chat/completions/render": _chat,
    "/cohere/v2/chat": _chat,
    "/cohere/v2/chat/render": _chat,
    "/tokenize": _chat,
    "/v1/embeddings": _chat,
    "/pooling": _chat,
    "/classify": _chat,
    "/invocations": _chat,
    "/v1/responses": _responses,
    "/v1/responses/render": _responses,
    "/v1/messages": _anthropic,
    "/v1/messages/count_tokens": _anthropic,
    "/v1/messages/render": _anthropic,
    "/v2/embed": _embed,
    "/v1/systemone": _images,
    "/score": _score,
    "/v1/score": _score,
    "/inference/v1/generate": _generate,
}
