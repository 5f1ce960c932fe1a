# SPDX-License-Identifier: Apache-2.0
"""The ASGI layer that puts images in the places of ids of files, and of uuids. API server process, event loop.

The application gets a short name where an image's content would be (content/placeholders.py). lazy_media opens it: an
image that is known already is not even read. A body that names no file goes on as it came, byte for byte.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_mmcache.base import tenant
from vllm_mmcache.base.asgi import (
    App,
    Message,
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
from vllm_mmcache.files.errors import Refusal, salt_of, unknown
from vllm_mmcache.files.named import NamedImages, Saving
from vllm_mmcache.files.references import NamedImage, Reference, named_images, references
from vllm_mmcache.files.store import FileInfo, FileLost, FileStore
from vllm_mmcache.metrics import counters

MOST_FILES = 1024
"""That one request may name."""
UUID_KEY = (b'"uuid"', b"\\u0075", b"\\u0069", b"\\u0064")
"""One of them is in each JSON that has this key, however its letters are written."""
GUARDED = "/v1/"
"""Paths below it need vLLM's API key, where there is one. A request to another path writes nothing."""


class StoredImage:
    """A stored file as the content of an image, which is read when somebody needs it. Any thread."""

    def __init__(self, content_id: bytes, read: Callable[[], bytes]) -> None:
        self.content_id = content_id
        self.text = b""
        self.unreachable = ""
        """Why the place of the files did not serve, if somebody has asked and it did not."""
        self._read = read

    def decode(self) -> bytes:
        """The file. Raises: ValueError where it can't be read; vLLM answers with the status 400."""
        try:
            return self._read()
        except FileLost as error:
            raise ValueError(str(error)) from error
        except FilesUnusable as error:
            self.unreachable = str(error)
            raise ValueError(str(error)) from error


@dataclass
class Named:
    """What a request names: files, and images by uuids; and what then stands for them, by its name in the request."""

    request: dict[str, Any]
    files: list[Reference]
    images: list[NamedImage]
    payloads: dict[str, StoredImage] = field(default_factory=dict)

    @property
    def unreachable(self) -> str:
        """Why the place of the files did not serve when one of them was read; empty if it did."""
        return next((image.unreachable for image in self.payloads.values() if image.unreachable), "")


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
        named_images: NamedImages | None = None,
    ) -> None:
        self.app = app
        self.store = store
        self.may_name_files = may_name_files
        self.takes_files = takes_files
        self.named_images = named_images

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call; a request whose files are not all there is refused. Raises: as the application."""
        if scope["type"] != "http" or scope["method"] != "POST" or not is_plain_json(scope):
            return await self.app(scope, receive, send)
        path = path_of(scope)
        if not self.may_name_files(path):
            return await self.app(scope, receive, send)
        messages = await receive_all(receive)
        body = b"".join([message.get("body", b"") for message in messages])
        named = self._parsed(body, partial(self.takes_files, scope, path))
        if not named.files and not named.images:
            return await self.app(scope, receive_again(messages, receive), send)
        try:
            if not self.takes_files(scope, path):
                raise Refusal(400, "This server can't take images by 'file_id' here. Send the image itself.", "file_id")
            salt = salt_of(named.request.get("cache_salt"))
            key = tenant.key_of(salt)
            await self._put_files(named, key)
            await self._put_images(named, salt, key)
        except Refusal as refusal:
            if named.files:
                counters.FILE_REQUESTS.add(1, "name", "failed" if refusal.status == 503 else "refused")
                return await refusal.response(path)(scope, receive, send)
            return await self.app(scope, receive_again(messages, receive), send)  # vLLM and identity say what is wrong
        if named.payloads:
            messages = as_message(json.dumps(named.request).encode())
        with placeholders.register(named.payloads):
            async with self._saving(named.images, key, writes=path.startswith(GUARDED)) as saving:
                await self.app(scope, receive_again(messages, receive), _answering(named, saving, scope, path, send))
        if named.files:
            counters.FILE_REQUESTS.add(1, "name", "failed" if named.unreachable else "done")

    def _parsed(self, body: bytes, takes_files: Callable[[], bool]) -> Named:
        """The request and what it names; nothing where it names nothing, or is no request."""
        has_uuid = self.named_images is not None and any(text in body for text in UUID_KEY)
        asks = b"file_id" in body, has_uuid and takes_files()
        try:
            request = json.loads(body) if any(asks) else None
        except (ValueError, RecursionError):
            request = None  # vLLM says what is wrong with it
        if not isinstance(request, dict):
            return Named({}, [], [])
        return Named(request, [*references(request)] if asks[0] else [], [*named_images(request)] if asks[1] else [])

    async def _put_files(self, named: Named, key: bytes | None) -> None:
        """Puts files in the places of their ids. Raises: Refusal."""
        ids = list(dict.fromkeys(reference.file_id for reference in named.files))
        if len(ids) > MOST_FILES:
            raise Refusal(400, f"The request names {len(ids)} files; at most {MOST_FILES} are allowed.", "file_id")
        try:
            infos = await asyncio.gather(
                *(self.store.reading.wait_for_async(self.store.find, key, file_id) for file_id in ids)
            )
        except FilesUnusable as error:
            raise Refusal(503, str(error)) from error
        found: dict[str, tuple[str, str]] = {}
        for file_id, info in zip(ids, infos, strict=True):
            if info is None:
                raise unknown(file_id)
            found[file_id] = info.media_type, _lend(named, info, _reader(self.store, key, info))
        for reference in named.files:
            reference.put(*found[reference.file_id])
        counters.FILES_NAMED.add(len(named.files), "file_id")

    async def _put_images(self, named: Named, salt: str | None, key: bytes | None) -> None:
        """Puts images in the places of the uuids that other replicas know."""
        if self.named_images is not None:
            for image, info in await self.named_images.find(named.images, salt, key):
                name = _lend(named, info, _reader(self.named_images.store, key, info, image.uuid))
                image.put(info.media_type, name)
                counters.FILES_NAMED.add(1, "uuid")

    def _saving(
        self, images: list[NamedImage], key: bytes | None, *, writes: bool
    ) -> AbstractAsyncContextManager[Saving]:
        return (
            nullcontext(Saving()) if self.named_images is None else self.named_images.saving(images, key, writes=writes)
        )


def _answering(named: Named, saving: Saving, scope: Scope, path: str, send: Send) -> Send:
    """The request's send, which notes whether the answer is an error.

    It answers with 503 where vLLM's answer is 400 since a file can't be reached.
    """
    is_replaced = False

    async def send_answer(message: Message) -> None:
        nonlocal is_replaced
        if message["type"] == "http.response.start" and message["status"] >= 400:
            saving.is_refused = True
        if message["type"] == "http.response.start" and message["status"] == 400 and named.unreachable:
            is_replaced = True
            await Refusal(503, named.unreachable).response(path)(scope, _nothing, send)
        if not is_replaced:
            await send(message)

    return send_answer


async def _nothing() -> Message:
    """What a response receives that asks nobody."""
    return {"type": "http.disconnect"}


def _reader(store: FileStore, key: bytes | None, info: FileInfo, name: str | None = None) -> Callable[[], bytes]:
    """Reads a file in a thread of its store: others wait in the threads of whoever calls it, and not for ever."""
    return partial(store.reading.wait_for, store.read, key, info, name)


def _lend(named: Named, info: FileInfo, read: Callable[[], bytes]) -> str:
    """The name that stands for a file in the request."""
    name = f"{placeholders.new_stem()}0"
    named.payloads[name] = StoredImage(info.content_id, read)
    return name
