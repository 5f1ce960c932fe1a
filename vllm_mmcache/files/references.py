# SPDX-License-Identifier: Apache-2.0
"""Where a request names files: parts of messages in chat completions, Responses and Anthropic's messages. Pure.

{"type": "file", "file": {"file_id": ID}}                       chat completions
{"type": "input_image", "file_id": ID}, or "input_file"         Responses
{"type": "image", "source": {"type": "file", "file_id": ID}}    Anthropic
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_mmcache.content.content_name import MAX_UUID_CHARS

Json = dict[str, Any]

_CONTENTS = ("messages", "inputs", "data_1", "data_2", "queries", "documents", "items", "text_1", "text_2")
"""Keys of requests whose values have contents: chats, and what is embedded, scored or compared."""


@dataclass(frozen=True)
class Reference:
    """One place of a request that names a file."""

    file_id: str
    put: Callable[[str, str], None]
    """Puts an image there, in place of the name: its media type, and its content in base64 or what stands for it."""


def references(request: Json) -> Iterator[Reference]:
    """Those in a parsed request, in its order."""
    for message in _messages(_list(request.get("messages"))):
        yield from _in_parts(message.get("content"), of_user=message.get("role") == "user")
    for item in _dicts(request.get("input")):
        yield from _in_parts(item.get("content"), of_user=item.get("role") == "user")
        if item.get("type") == "function_call_output":
            yield from _in_parts(item.get("output"))


@dataclass(frozen=True)
class NamedImage:
    """An image that its client calls by a uuid. url is None where the request holds the uuid alone.

    Only a url that is text may be the image's content.
    """

    uuid: str
    url: Any
    put: Callable[[str, str], None]
    """As of a Reference; the uuid stays."""


def named_images(request: Json) -> Iterator[NamedImage]:
    """Those in a parsed request, in its order: each part of a content for which vLLM takes an `image_url` by a uuid.

    With a uuid vLLM takes it whatever the part's type, makes text of the uuid, and takes a url without text for none.
    Uuids that are too long or no Unicode text are left out: they are refused later on.
    """
    for part in _contents(request):
        if (uuid := part.get("uuid")) is None or "image_url" not in part:
            continue
        uuid, image = str(uuid), part["image_url"]
        if len(uuid) <= MAX_UUID_CHARS and _is_unicode(uuid):
            url = image.get("url") if isinstance(image, dict) else image
            yield NamedImage(uuid, url or None, _chat_image(part))


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 has it: half of a surrogate pair is in JSON alone."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _contents(request: Json) -> Iterator[Json]:
    """The parts of all contents of a parsed request."""
    for key in _CONTENTS:
        for message in _messages(request.get(key)):
            yield from _dicts(message.get("content"))


def _messages(value: Any) -> Iterator[Json]:
    """Each message of a conversation, or of the conversations of a batch; or the one that `value` is."""
    for message in value if isinstance(value, list) else [value]:
        yield from _dicts(message if isinstance(message, list) else [message])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[Json]:
    return [one for one in _list(value) if isinstance(one, dict)]


def _in_parts(parts: Any, *, of_user: bool = False) -> Iterator[Reference]:
    for part in _dicts(parts):
        kind, file, source = part.get("type"), part.get("file"), part.get("source")
        if kind == "file" and isinstance(file, dict) and isinstance(file.get("file_id"), str):
            yield Reference(file["file_id"], _chat_image(part))
        elif kind in ("input_image", "input_file") and isinstance(part.get("file_id"), str):
            yield Reference(part["file_id"], _input_image(part))
        elif kind == "image" and isinstance(source, dict) and source.get("type") == "file":
            if isinstance(source.get("file_id"), str):
                yield Reference(source["file_id"], _anthropic_image(part))
        elif kind == "tool_result" and of_user:  # of others, vLLM makes text of it
            yield from _in_parts(part.get("content"))


def _chat_image(part: Json) -> Callable[[str, str], None]:
    def put(media_type: str, content: str) -> None:
        part.pop("file", None)
        part.update(type="image_url", image_url={"url": _data_url(media_type, content)})

    return put


def _input_image(part: Json) -> Callable[[str, str], None]:
    def put(media_type: str, content: str) -> None:
        del part["file_id"]
        part.update(type="input_image", image_url=_data_url(media_type, content))
        part.setdefault("detail", "auto")

    return put


def _anthropic_image(part: Json) -> Callable[[str, str], None]:
    def put(media_type: str, content: str) -> None:
        part["source"] = {"type": "base64", "media_type": media_type, "data": content}

    return put


def _data_url(media_type: str, content: str) -> str:
    return f"data:{media_type};base64,{content}"
