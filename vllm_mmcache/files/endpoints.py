# SPDX-License-Identifier: Apache-2.0
"""`/v1/files`: upload, list, look at, read and delete files, in OpenAI's form. API server process, event loop.

Whose files they are is said as everywhere: by a header or API key where the setting tenant_from says so, and otherwise
by `cache_salt`, which is a field of the form that uploads a file, and else a parameter of the URL.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_mmcache.base.asgi import Message, path_of
from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.files.errors import MOST_SHOWN, Refusal, tenant_key, unknown
from vllm_mmcache.files.image_file import head_of
from vllm_mmcache.files.store import FileInfo, FileStore, QuotaExceeded

PATH = "/v1/files"
PURPOSES = ("vision", "user_data")
MOST_LISTED = 10_000
_FORM_BYTES = 1 << 16
"""Of an upload, beside the file."""
_NAME_CHARS = 255
_EXPIRES_AFTER = "expires_after[seconds]"
_LEAST_S, _MOST_S = 3600, 2_592_000
"""Of OpenAI's expires_after."""

Handler = Callable[[Request], Awaitable[Response]]


class FileEndpoints:
    """The endpoints on one store. max_bytes: of a file; max_pixels: of an image."""

    def __init__(self, store: FileStore, max_bytes: int, max_pixels: int) -> None:
        self.store = store
        self.max_bytes = max_bytes
        self.max_pixels = max_pixels

    def routes(self) -> list[Route]:
        """What an application has to have."""
        one = PATH + "/{file_id}"
        return [
            Route(PATH, _answering(self.create), methods=["POST"]),
            Route(PATH, _answering(self.list_files), methods=["GET"]),
            Route(one, _answering(self.retrieve), methods=["GET"]),
            Route(one, _answering(self.delete), methods=["DELETE"]),
            Route(one + "/content", _answering(self.content), methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """POST: a form with `file`, `purpose` and, if you like, `expires_after` and `cache_salt`."""
        limited = Request(request.scope, _limited(request, self.max_bytes + _FORM_BYTES, self.max_bytes))
        try:
            async with limited.form(max_files=1, max_fields=16) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if file is None or isinstance(file, str):
                    raise Refusal(400, "The form has no field 'file' with a file.", "file")
                if purpose not in PURPOSES:
                    shown = str(purpose)[:MOST_SHOWN]
                    raise Refusal(400, f"'purpose' is {shown!r}; it has to be 'vision' or 'user_data'.", "purpose")
                key = tenant_key(form.get("cache_salt"))
                lives_s = _expires_after(form.get(_EXPIRES_AFTER))
                content, filename = await file.read(), (file.filename or "image")[:_NAME_CHARS]
        except HTTPException as error:
            raise Refusal(400, f"The form can't be read: {error.detail}", "file") from error
        if len(content) > self.max_bytes:
            raise _too_large(self.max_bytes)

        def keep() -> FileInfo:
            media_type = self._media_type(content)
            return self.store.put(
                key,
                content,
                filename=filename,
                purpose=str(purpose),
                media_type=media_type,
                expires_after_s=lives_s,
            )

        try:
            return JSONResponse(_shown(await self.store.in_thread(keep)))
        except QuotaExceeded as error:
            raise Refusal(413, f"The tenant's files take too much: {error}. Delete some first.", "file") from error

    async def list_files(self, request: Request) -> Response:
        """GET: the latest first, with `limit`, `after`, `order` and `purpose` as OpenAI has them."""
        wanted = request.query_params
        files = await self.store.in_thread(self.store.files_of, tenant_key(wanted.get("cache_salt")))
        if wanted.get("order", "desc") == "asc":
            files.reverse()
        if "purpose" in wanted:
            files = [info for info in files if info.purpose == wanted["purpose"]]
        if "after" in wanted:
            ids = [info.id for info in files]
            if wanted["after"] not in ids:
                raise unknown(wanted["after"])
            files = files[ids.index(wanted["after"]) + 1 :]
        limit = wanted.get("limit", str(MOST_LISTED))
        if not re.fullmatch(r"[1-9][0-9]{0,4}", limit) or int(limit) > MOST_LISTED:
            raise Refusal(400, f"'limit' is {limit[:MOST_SHOWN]!r}; it has to be 1 to {MOST_LISTED}.", "limit")
        page = [_shown(info) for info in files[: int(limit)]]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(files) > len(page)})

    async def retrieve(self, request: Request) -> Response:
        """GET of one: what is said of it."""
        _, info = await self._found(request)
        return JSONResponse(_shown(info))

    async def content(self, request: Request) -> Response:
        """GET of its content."""
        key, info = await self._found(request)
        content = await self.store.in_thread(self.store.read, key, info)
        kept_as_it_is = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return Response(content, media_type=info.media_type, headers=kept_as_it_is)

    async def delete(self, request: Request) -> Response:
        """DELETE: it is gone for all replicas when this is answered."""
        key, file_id = tenant_key(request.query_params.get("cache_salt")), request.path_params["file_id"]
        if not await self.store.in_thread(self.store.delete, key, file_id):
            raise unknown(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _found(self, request: Request) -> tuple[bytes | None, FileInfo]:
        key, file_id = tenant_key(request.query_params.get("cache_salt")), request.path_params["file_id"]
        info = await self.store.in_thread(self.store.find, key, file_id)
        if info is None:
            raise unknown(file_id)
        return key, info

    def _media_type(self, content: bytes) -> str:
        """Of an image whose head can be read. Raises: Refusal (400) for anything else, and for too many pixels."""
        head = head_of(content)
        if head is None:
            raise Refusal(400, "The file is no image that can be opened: upload PNG, JPEG, WebP or GIF.", "file")
        if head.width * head.height > self.max_pixels:
            raise Refusal(
                400, f"The image has {head.width}x{head.height} pixels; {self.max_pixels} are allowed.", "file"
            )
        return head.media_type


def _answering(handler: Handler) -> Handler:
    """A handler whose refusals are answers."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Refusal as refusal:
            return refusal.response(path_of(request.scope))
        except FilesUnusable as error:
            return Refusal(503, str(error)).response(path_of(request.scope))

    return answer


def _limited(request: Request, most: int, max_bytes: int) -> Callable[[], Awaitable[Message]]:
    """The request's receive, which refuses a body of more than `most` bytes before it is all there."""
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > most:
            raise _too_large(max_bytes)
        return message

    return receive


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"The file is too large: at most {max_bytes} bytes are allowed (MMCACHE_FILE_BYTES).", "file")


def _expires_after(text: Any) -> int | None:
    if text is None:
        return None
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,9}", text) or not _LEAST_S <= int(text) <= _MOST_S:
        shown = str(text)[:MOST_SHOWN]
        raise Refusal(400, f"'{_EXPIRES_AFTER}' is {shown!r}; it has to be {_LEAST_S} to {_MOST_S}.", "expires_after")
    return int(text)


def _shown(info: FileInfo) -> dict[str, Any]:
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
