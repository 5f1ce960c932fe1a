# SPDX-License-Identifier: Apache-2.0
"""The ASGI layer that puts images in the place of the ids of files. API server process, event loop.

The application gets a short name where an image's content would be (content/placeholders.py). lazy_media opens it: an
image that is known already is not even read. A body that names no file goes on as it came, byte for byte.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from vllm_mmcache.base.asgi import (
    App,
    Receive,
    Scope,
    Send,
    as_message,
    is_plain_json,
    path_of,
    receive_again,
    receive_all,
)
from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.content import placeholders
from vllm_mmcache.files.errors import Refusal, tenant_key, unknown
from vllm_mmcache.files.references import Reference, references
from vllm_mmcache.files.store import FileInfo, FileStore

MOST_FILES = 1024
"""That one request may name."""


class StoredImage:
    """A stored file as the content of an image, which is read when somebody needs it. Any thread."""

    def __init__(self, store: FileStore, key: bytes | None, info: FileInfo) -> None:
        self._store, self._key, self._info = store, key, info
        self.content_id = info.content_id
        self.text = b""

    def decode(self) -> bytes:
        """The file. Raises: ValueError where it can't be read; vLLM answers with the status 400."""
        try:
            return self._store.read(self._key, self._info)
        except FilesUnusable as error:
            raise ValueError(str(error)) from error


class PutFilesMiddleware:
    """Pure ASGI. may_name_files is asked for each POST of JSON, by its scope and path; takes_files, if files are named.

    The first says whether a request at this path may hold images, the second whether they all go to lazy_media.
    """

    def __init__(
        self,
        app: App,
        store: FileStore,
        may_name_files: Callable[[str], bool],
        takes_files: Callable[[Scope, str], bool],
    ) -> None:
        self.app = app
        self.store = store
        self.may_name_files = may_name_files
        self.takes_files = takes_files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call; a request whose files are not all there is refused. Raises: as the application."""
        if scope["type"] != "http" or scope["method"] != "POST" or not is_plain_json(scope):
            return await self.app(scope, receive, send)
        path = path_of(scope)
        if not self.may_name_files(path):
            return await self.app(scope, receive, send)
        messages = await receive_all(receive)
        body = b"".join([message.get("body", b"") for message in messages])
        request, found = _parsed(body)
        if not found:
            return await self.app(scope, receive_again(messages, receive), send)
        try:
            if not self.takes_files(scope, path):
                raise Refusal(400, "This server can't take images by 'file_id' here. Send the image itself.", "file_id")
            payloads = await self._put(request, found)
        except Refusal as refusal:
            return await refusal.response(path)(scope, receive, send)
        with placeholders.register(payloads):
            await self.app(scope, receive_again(as_message(json.dumps(request).encode()), receive), send)

    async def _put(self, request: dict[str, Any], found: list[Reference]) -> dict[str, StoredImage]:
        """Changes the request. Returns: what the names in it stand for. Raises: Refusal."""
        ids = list(dict.fromkeys(reference.file_id for reference in found))
        if len(ids) > MOST_FILES:
            raise Refusal(400, f"The request names {len(ids)} files; at most {MOST_FILES} are allowed.", "file_id")
        key = tenant_key(request.get("cache_salt"))
        try:
            infos = await asyncio.gather(*(self.store.in_thread(self.store.find, key, file_id) for file_id in ids))
        except FilesUnusable as error:
            raise Refusal(503, str(error)) from error
        stem, payloads, names = placeholders.new_stem(), {}, {}
        for number, (file_id, info) in enumerate(zip(ids, infos, strict=True)):
            if info is None:
                raise unknown(file_id)
            names[file_id] = info.media_type, f"{stem}{number}"
            payloads[f"{stem}{number}"] = StoredImage(self.store, key, info)
        for reference in found:
            reference.put(*names[reference.file_id])
        return payloads


def _parsed(body: bytes) -> tuple[dict[str, Any], list[Reference]]:
    """The request and the files that it names; nothing where it names none, or is none."""
    if b"file_id" not in body:
        return {}, []
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return {}, []  # vLLM says what is wrong with it
    return (request, list(references(request))) if isinstance(request, dict) else ({}, [])
