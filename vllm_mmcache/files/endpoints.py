# SPDX-License-Identifier: Apache-2.0
"""`/v1/files`: upload, list, look at, read and delete files. API server process, event loop.

Requests and answers have OpenAI's form or Anthropic's (forms.py).

Whose files they are is said as everywhere: by a header or API key where the setting tenant_from says so, and otherwise
by `cache_salt`: the header SALT_HEADER, a field of the form that uploads a file, or a parameter of the URL. It is as
good as a password, so it is taken out of the URL before the web server logs that.
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode
from weakref import WeakValueDictionary

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_mmcache.base.asgi import App, Message, Receive, Scope, Send, path_of
from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.files.access import UNREACHABLE
from vllm_mmcache.files.errors import Refusal, tenant_key, unknown
from vllm_mmcache.files.forms import form_of
from vllm_mmcache.files.image_file import head_of
from vllm_mmcache.files.store import LONGEST_S, FileInfo, FileLost, FileStore, QuotaExceeded
from vllm_mmcache.metrics import counters

PATH = "/v1/files"
_FORM_BYTES = 1 << 16
"""Of an upload, beside the file."""
_NAME_CHARS = 255
SALT_HEADER = "x-cache-salt"
_SALTS = "mmcache.salts"
"""In the scope of a request: what its URL had as `cache_salt`."""
_LISTS_AT_ONCE = 4
"""Of all tenants: a list reads what is said of each file, and other requests need threads, too."""
Handler = Callable[[Request], Awaitable[Response]]


class HideSalts:
    """Pure ASGI. It takes `cache_salt` out of the URL of each request about files, before the web server logs that.

    The outermost layer: others answer requests, too. A slash at the end of the path goes as well, since Starlette would
    answer with the URL that is without it, and the client would ask again without its tenant.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call. Raises: as the application."""
        if scope["type"] in ("http", "websocket") and re.sub("/+", "/", f"{path_of(scope)}/").startswith(f"{PATH}/"):
            scope["path"] = scope["path"].rstrip("/")
            fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            if salts := [value for name, value in fields if name == "cache_salt"]:
                scope[_SALTS] = salts
                others = [(name, value) for name, value in fields if name != "cache_salt"]
                scope["query_string"] = urlencode(others).encode("latin-1")
        await self.app(scope, receive, send)


class FileEndpoints:
    """The endpoints on one store, behind HideSalts.

    max_bytes: of a file. max_pixels: of an image; 0 for any number. formats: those of images, by Pillow's names; all if
    None.
    """

    def __init__(
        self, store: FileStore, max_bytes: int, max_pixels: int, formats: tuple[str, ...] | None = None
    ) -> None:
        self.store = store
        self.max_bytes = max_bytes
        self.max_pixels = max_pixels
        self.formats = formats
        self._listing = asyncio.Semaphore(_LISTS_AT_ONCE)
        self._listing_of: WeakValueDictionary[bytes | None, asyncio.Lock] = WeakValueDictionary()

    def routes(self) -> list[Route]:
        """What an application has to have."""
        one = PATH + "/{file_id}"
        return [
            Route(PATH, _answering("create", self.create), methods=["POST"]),
            Route(PATH, _answering("list", self.list_files), methods=["GET"]),
            Route(one, _answering("retrieve", self.retrieve), methods=["GET"]),
            Route(one, _answering("delete", self.delete), methods=["DELETE"]),
            Route(one + "/content", _answering("content", self.content), methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """POST: a form with `file`, what the API's form has beside it, and, if you like, `cache_salt`."""
        given = _given_salt(request)
        receive = _limited(request, self.max_bytes + _FORM_BYTES, self.max_bytes)
        async with _form(Request(request.scope, receive)) as form:
            file = form.get("file")
            if file is None or isinstance(file, str):
                raise Refusal(400, "The form has no field 'file' with a file.", "file")
            purpose, lives_s = form_of(request).upload(form)
            key = tenant_key(_same_salt(form.get("cache_salt"), given))
            content, filename = await file.read(), _as_utf8(file.filename or "image")[:_NAME_CHARS]
        if len(content) > self.max_bytes:
            raise _too_large(self.max_bytes)

        def keep() -> FileInfo:
            media_type = self._media_type(content)
            return self.store.put(
                key,
                content,
                filename=filename,
                purpose=purpose,
                media_type=media_type,
                expires_after_s=lives_s,
            )

        try:
            info = await self.store.writing.wait_for_async(keep, longest_s=LONGEST_S)
        except QuotaExceeded as error:
            raise Refusal(413, f"The tenant's files take too much: {error}. Delete some first.", "file") from error
        return JSONResponse(form_of(request).file(info))

    async def list_files(self, request: Request) -> Response:
        """GET: the latest first."""
        key = tenant_key(_given_salt(request))
        lock = self._listing_of.setdefault(key, asyncio.Lock())  # one at a time of a tenant
        try:
            async with asyncio.timeout(LONGEST_S), lock, self._listing:
                files = await self.store.reading.wait_for_async(self.store.files_of, key, longest_s=LONGEST_S)
        except TimeoutError as error:
            raise FilesUnusable(UNREACHABLE) from error
        return JSONResponse(form_of(request).page(files, request.query_params))

    async def retrieve(self, request: Request) -> Response:
        """GET of one: what is said of it."""
        _, info = await self._found(request)
        return JSONResponse(form_of(request).file(info))

    async def content(self, request: Request) -> Response:
        """GET of its content."""
        key, info = await self._found(request)
        try:
            content = await self.store.reading.wait_for_async(self.store.read, key, info)
        except FileLost as error:
            raise Refusal(404, str(error), "file_id") from error
        kept_as_it_is = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return Response(content, media_type=info.media_type, headers=kept_as_it_is)

    async def delete(self, request: Request) -> Response:
        """DELETE: it is gone for all replicas when this is answered."""
        key, file_id = tenant_key(_given_salt(request)), request.path_params["file_id"]
        if not await self.store.writing.wait_for_async(self.store.delete, key, file_id):
            raise unknown(file_id)
        return JSONResponse(form_of(request).deleted(file_id))

    async def _found(self, request: Request) -> tuple[bytes | None, FileInfo]:
        key, file_id = tenant_key(_given_salt(request)), request.path_params["file_id"]
        info = await self.store.reading.wait_for_async(self.store.find, key, file_id)
        if info is None:
            raise unknown(file_id)
        return key, info

    def _media_type(self, content: bytes) -> str:
        """Of an image whose head can be read. Raises: Refusal (400) for anything else, and for too many pixels."""
        head = head_of(content, self.formats)
        if head is None:
            raise Refusal(400, "The file is no image that can be opened: upload PNG, JPEG, WebP or GIF.", "file")
        if 0 < self.max_pixels < head.width * head.height:
            raise Refusal(
                400, f"The image has {head.width}x{head.height} pixels; {self.max_pixels} are allowed.", "file"
            )
        return head.media_type


def _answering(operation: str, handler: Handler) -> Handler:
    """A handler whose refusals are answers, and whose requests are counted."""

    async def answer(request: Request) -> Response:
        try:
            response = await handler(request)
        except Refusal as refusal:
            counters.FILE_REQUESTS.add(1, operation, "refused")
            return refusal.response(form_of(request).errors_as_at)
        except FilesUnusable as error:
            counters.FILE_REQUESTS.add(1, operation, "failed")
            return Refusal(503, str(error)).response(form_of(request).errors_as_at)
        counters.FILE_REQUESTS.add(1, operation, "done")
        return response

    return answer


class _InMemory(MultiPartParser):
    """A parser that writes no file to the folder for temporary ones, where it would not be encrypted."""

    spool_max_size = sys.maxsize


@asynccontextmanager
async def _form(request: Request) -> AsyncIterator[FormData]:
    """The fields of an upload, all of it in RAM, in this block. Raises: Refusal (400) for what is no such form."""
    form = FormData()
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        try:
            async with aclosing(request.stream()) as stream:
                form = await _InMemory(request.headers, stream, max_files=1, max_fields=16).parse()
        except MultiPartException as error:
            raise Refusal(400, f"The form can't be read: {error.message}", "file") from error
    try:
        yield form
    finally:
        await form.close()


def _given_salt(request: Request) -> str | None:
    """The cache_salt of a request, by its header or its URL. Raises: Refusal."""
    salt: str | None = None
    for value in request.headers.getlist(SALT_HEADER):
        try:
            salt = _same_salt(value.encode("latin-1").decode(), salt)
        except UnicodeDecodeError as error:
            raise Refusal(400, f"Header '{SALT_HEADER}' is no text in UTF-8.", "cache_salt") from error
    for one in request.scope.get(_SALTS, ()):
        salt = _same_salt(one, salt)
    return salt


def _same_salt(one: Any, other: str | None) -> str | None:
    """The cache_salt of a request that names one in two places. Raises: Refusal (400) where they differ."""
    if None not in (one, other) and one != other:
        raise Refusal(400, f"'cache_salt' and header '{SALT_HEADER}' name two tenants: name one.", "cache_salt")
    found: str | None = other if one is None else one  # a form can hold anything, which is refused where it is read
    return found


def _as_utf8(text: str) -> str:
    """A text without what UTF-8 has not."""
    return text.encode("utf-8", "replace").decode()


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
