# SPDX-License-Identifier: Apache-2.0
"""What `/v1/files` takes and answers, in the form of OpenAI and in that of Anthropic. API server process.

A client of Anthropic is known by its header `anthropic-version`.
"""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.datastructures import FormData, QueryParams
from starlette.requests import Request

from vllm_mmcache.files.errors import MOST_SHOWN, Refusal, unknown
from vllm_mmcache.files.store import FileInfo

PURPOSES = ("vision", "user_data")
_CURSOR = "page_"  # before the id of the file behind which Anthropic's next page begins


class Form(Protocol):
    """The form of one API."""

    errors_as_at: str
    """A path of vLLM at which errors have this form."""

    def upload(self, form: FormData) -> tuple[str, int | None]:
        """The purpose of an upload, and for how many seconds it is to be kept, if it says so. Raises: Refusal."""

    def file(self, info: FileInfo) -> dict[str, Any]:
        """What is said of a file."""

    def page(self, files: Sequence[FileInfo], wanted: QueryParams) -> dict[str, Any]:
        """The part of a tenant's files, the latest first, that was asked for. Raises: Refusal."""

    def deleted(self, file_id: str) -> dict[str, Any]:
        """What is said of a file that was removed."""


class OpenAIForm:
    """That of OpenAI."""

    errors_as_at = "/v1/files"
    lives_s = 3600, 2_592_000
    """What expires_after may be."""
    most_listed = 10_000

    def upload(self, form: FormData) -> tuple[str, int | None]:
        """As Form says."""
        purpose = form.get("purpose")
        if purpose not in PURPOSES:
            shown = str(purpose)[:MOST_SHOWN]
            raise Refusal(400, f"'purpose' is {shown!r}; it has to be 'vision' or 'user_data'.", "purpose")
        return str(purpose), _seconds(form, "expires_after[seconds]", "expires_after", self.lives_s)

    def file(self, info: FileInfo) -> dict[str, Any]:
        """As OpenAI's File object."""
        ends = {} if info.expires_s is None else {"expires_at": info.expires_s}
        return {
            "id": info.id,
            "object": "file",
            "bytes": info.num_bytes,
            "created_at": info.created_s,
            "filename": info.filename,
            "purpose": info.purpose,
            "status": "processed",
            **ends,
        }

    def page(self, files: Sequence[FileInfo], wanted: QueryParams) -> dict[str, Any]:
        """By `limit`, `after`, `order` and `purpose`."""
        if wanted.get("order", "desc") == "asc":
            files = files[::-1]
        if "purpose" in wanted:
            files = [info for info in files if info.purpose == wanted["purpose"]]
        return {
            "object": "list",
            **_part(files, wanted, wanted.get("after"), self.most_listed, self.most_listed, self.file),
        }

    def deleted(self, file_id: str) -> dict[str, Any]:
        """As Form says."""
        return {"id": file_id, "object": "file", "deleted": True}


class AnthropicForm:
    """That of Anthropic."""

    errors_as_at = "/v1/messages"
    lives_s = 3600, 7_776_000
    """What expires_in_seconds may be."""
    listed, most_listed = 20, 1000

    def upload(self, form: FormData) -> tuple[str, int | None]:
        """As Form says; all are images for messages."""
        return "vision", _seconds(form, "expires_in_seconds", "expires_in_seconds", self.lives_s)

    def file(self, info: FileInfo) -> dict[str, Any]:
        """As Anthropic's FileMetadata."""
        return {
            "id": info.id,
            "type": "file",
            "filename": info.filename,
            "mime_type": info.media_type,
            "size_bytes": info.num_bytes,
            "created_at": _moment(info.created_s),
            "downloadable": True,
            "expires_at": None if info.expires_s is None else _moment(info.expires_s),
        }

    def page(self, files: Sequence[FileInfo], wanted: QueryParams) -> dict[str, Any]:
        """By `limit` and `page`, or by `after_id` as earlier clients ask; or those that `ids` names."""
        if "before_id" in wanted:
            raise Refusal(400, "'before_id' can't be used here: list from the first page on.", "before_id")
        ids = {*wanted.getlist("ids"), *wanted.getlist("ids[]")}
        if ids:
            files = [info for info in files if info.id in ids]
        after = wanted.get("after_id", wanted.get("page", "").removeprefix(_CURSOR) or None)
        found = _part(files, wanted, after, self.listed, self.most_listed, self.file)
        return {**found, "next_page": f"{_CURSOR}{found['last_id']}" if found["has_more"] else None}

    def deleted(self, file_id: str) -> dict[str, Any]:
        """As Form says."""
        return {"id": file_id, "type": "file_deleted"}


OPENAI, ANTHROPIC = OpenAIForm(), AnthropicForm()


def form_of(request: Request) -> Form:
    """The form in which a client asks."""
    return ANTHROPIC if "anthropic-version" in request.headers else OPENAI


def _part(
    files: Sequence[FileInfo],
    wanted: QueryParams,
    after: str | None,
    listed: int,
    most: int,
    shown: Callable[[FileInfo], dict[str, Any]],
) -> dict[str, Any]:
    """The files behind the one with the id `after`, at most `limit` of them."""
    if after is not None:
        ids = [info.id for info in files]
        if after not in ids:
            raise unknown(after)
        files = files[ids.index(after) + 1 :]
    limit = wanted.get("limit", str(listed))
    if not re.fullmatch(r"[1-9][0-9]{0,4}", limit) or int(limit) > most:
        raise Refusal(400, f"'limit' is {limit[:MOST_SHOWN]!r}; it has to be 1 to {most}.", "limit")
    page = [shown(info) for info in files[: int(limit)]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": page, **ends, "has_more": len(files) > len(page)}


def _seconds(form: FormData, field: str, parameter: str, between: tuple[int, int]) -> int | None:
    text, (least, most) = form.get(field), between
    if text is None:
        return None
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise Refusal(400, f"'{field}' is {str(text)[:MOST_SHOWN]!r}; it has to be {least} to {most}.", parameter)
    return int(text)


def _moment(seconds: int) -> str:
    """As RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
