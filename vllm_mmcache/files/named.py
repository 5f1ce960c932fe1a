# SPDX-License-Identifier: Apache-2.0
"""Images that clients name by a uuid, saved where all replicas find them. API server process, event loop.

A client that has sent an image with a uuid to one replica may send the uuid alone to another one, which then finds the
image in the store that they share. Only the client's own tenant finds it. Images are written in threads of the store
while their request is answered, and the request waits for that at its end, so that the other replica finds them when
the client sends the next request. None of this is certain: where an image was not saved or is not found, the replica
answers that the uuid is unknown, as it does without a shared store, and the client sends the image again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, LruTable, Size
from vllm_mmcache.content import placeholders
from vllm_mmcache.content.base64_image import Base64Image
from vllm_mmcache.files.image_file import head_of
from vllm_mmcache.files.references import NamedImage
from vllm_mmcache.files.store import FileInfo, FileStore, QuotaExceeded
from vllm_mmcache.metrics import table_sizes

PURPOSE = "uuid"
MOST_UNWRITTEN = 64
"""The most images that this process writes, or has in line to be written; further ones are not saved."""
LINGER_S = 5.0
"""How long an answered request waits for its images at most. What is not written then is written all the same."""
RENEW_S = 3600.0
"""An image that comes again with the same uuid is not written again by the same process for so long. Then it is, so
that it does not expire; other content under the uuid is always written at once."""
ENTRY_BYTES = 256
MOST_REMEMBERED = Budget(65536, 65536 * ENTRY_BYTES)
"""Of what this process has written."""


class NamedImages:
    """Images by tenant and uuid. salt and key, in all methods: of the tenant, and None for requests without one.

    is_known: says of a uuid and a salt whether this replica knows the image without looking in the store. max_bytes: of
    a file; larger ones are not saved.
    """

    def __init__(self, store: FileStore, is_known: Callable[[str, str | None], bool], max_bytes: int) -> None:
        self.store = store
        self._is_known = is_known
        self._max_bytes = max_bytes
        # tenant and uuid -> content id, and when it was written
        self._written: LruTable[tuple[bytes | None, str], tuple[bytes, float]] = LruTable(
            lambda: MOST_REMEMBERED, ENTRY_BYTES
        )
        self._num_unwritten = 0
        table_sizes.of_server("file_uuids", self.size)

    def size(self) -> Size:
        """Of what this process has written."""
        return self._written.size()

    async def find(
        self, images: list[NamedImage], salt: str | None, key: bytes | None
    ) -> list[tuple[NamedImage, FileInfo]]:
        """What the store has of those images that came as a uuid alone and that this replica does not know.

        Nothing, where the store can't be reached.
        """
        wanted = [one for one in images if one.url is None and not self._is_known(one.uuid, salt)]
        try:
            found = await asyncio.gather(
                *(self.store.in_thread(self.store.find_named, key, one.uuid) for one in wanted)
            )
        except FilesUnusable:
            return []
        return [(one, info) for one, info in zip(wanted, found, strict=True) if info is not None]

    @contextlib.asynccontextmanager
    async def saving(self, images: list[NamedImage], key: bytes | None) -> AsyncIterator[None]:
        """Saves those images that came with their content, while their request is answered in this block."""
        tasks = [
            asyncio.ensure_future(self._save(one.uuid, media_type, content, key))
            for one, media_type, content in _with_content(images)
        ]
        try:
            yield
        finally:
            if tasks:
                await asyncio.wait(tasks, timeout=LINGER_S)

    async def _save(self, uuid: str, media_type: str, image: placeholders.Payload | str, key: bytes | None) -> None:
        if self._num_unwritten >= MOST_UNWRITTEN:
            return
        self._num_unwritten += 1
        with failsafe("files"):
            try:
                await self.store.in_thread(self._write, uuid, media_type, image, key)
            except (FilesUnusable, QuotaExceeded, ValueError):
                pass  # a replica that is asked for the uuid alone does not find it
            finally:
                self._num_unwritten -= 1

    def _write(self, uuid: str, media_type: str, image: placeholders.Payload | str, key: bytes | None) -> None:
        """Write one image, unless it was written lately, is too large, or can't be opened.

        Raises: ValueError for text that is no base64, and otherwise what FileStore.put does.
        """
        payload = Base64Image(image.encode("ascii"), key) if isinstance(image, str) else image
        now = time.monotonic()
        content_id, written = self._written.get((key, uuid)) or (b"", 0.0)
        if content_id == payload.content_id and now - written < RENEW_S:
            return
        content = payload.decode()
        if len(content) > self._max_bytes or head_of(content) is None:
            return
        self.store.put(key, content, filename="", purpose=PURPOSE, media_type=media_type, name=uuid)
        self._written.replace((key, uuid), (payload.content_id, now))


def _with_content(images: list[NamedImage]) -> Iterator[tuple[NamedImage, str, placeholders.Payload | str]]:
    """Those that came as a data URL, each with its media type, and with its base64 text.

    Where image_extraction has taken the text out of the body, it is in a payload.
    """
    for image in images:
        head, _, text = (image.url or "").partition(";base64,")
        if text and head.startswith("data:image/"):
            yield image, head.removeprefix("data:"), placeholders.resolve(text) or text
