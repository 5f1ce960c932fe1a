# SPDX-License-Identifier: Apache-2.0
"""Images that clients call by a uuid, kept where all replicas find them. API server process, event loop.

A client that has sent an image with a uuid to one replica may send the uuid alone to another. That one finds the image
here. Only its own tenant finds it. An image is kept while its request is being answered, so that it is there when the
client has the answer; whatever goes wrong, the client is told as ever that the uuid is unknown, and sends the image.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.content import placeholders
from vllm_mmcache.content.base64_image import Base64Image
from vllm_mmcache.files.image_file import head_of
from vllm_mmcache.files.references import NamedImage
from vllm_mmcache.files.store import FileInfo, FileStore, QuotaExceeded

PURPOSE = "uuid"
MOST_WAITING = 64
"""Images that are being written; further ones are not kept."""
LINGER_S = 5.0
"""How long an answered request waits for its images to be written."""
RENEW_S = 3600.0
"""After which an image that is sent again is written again, so that it lives on."""
_RECENT = Budget(65536, 65536 * 256)


class NamedImages:
    """Images by tenant and uuid. is_known: whether this replica itself knows a uuid of the tenant with this salt."""

    def __init__(self, store: FileStore, is_known: Callable[[str, str | None], bool], max_bytes: int) -> None:
        self.store = store
        self._is_known = is_known
        self._max_bytes = max_bytes
        self._recent: LruTable[tuple[bytes | None, str], tuple[bytes, float]] = LruTable(lambda: _RECENT, 256)
        self._num_waiting = 0

    async def find(
        self, images: list[NamedImage], salt: str | None, key: bytes | None
    ) -> list[tuple[NamedImage, FileInfo]]:
        """Those that this replica does not know and that are kept here."""
        wanted = [one for one in images if one.url is None and not self._is_known(one.uuid, salt)]
        try:
            found = await asyncio.gather(
                *(self.store.in_thread(self.store.find_named, key, one.uuid) for one in wanted)
            )
        except FilesUnusable:
            return []
        return [(one, info) for one, info in zip(wanted, found, strict=True) if info is not None]

    @contextlib.asynccontextmanager
    async def keeping(self, images: list[NamedImage], key: bytes | None) -> AsyncIterator[None]:
        """Keeps those images that a request holds, while it is being answered in this block."""
        tasks = [
            asyncio.ensure_future(self._keep(one.uuid, media_type, content, key))
            for one, media_type, content in _held(images)
        ]
        try:
            yield
        finally:
            if tasks:
                await asyncio.wait(tasks, timeout=LINGER_S)

    async def _keep(self, uuid: str, media_type: str, image: placeholders.Payload | str, key: bytes | None) -> None:
        if self._num_waiting >= MOST_WAITING:
            return
        self._num_waiting += 1
        with failsafe("files"):
            try:
                await self.store.in_thread(self._write, uuid, media_type, image, key)
            except (FilesUnusable, QuotaExceeded, ValueError):
                pass  # the client sends the image again
            finally:
                self._num_waiting -= 1

    def _write(self, uuid: str, media_type: str, image: placeholders.Payload | str, key: bytes | None) -> None:
        """Raises: ValueError for what is no base64; as FileStore.put."""
        payload = Base64Image(image.encode("ascii"), key) if isinstance(image, str) else image
        now = time.monotonic()
        content_id, written = self._recent.get((key, uuid)) or (b"", 0.0)
        if content_id == payload.content_id and now - written < RENEW_S:
            return
        content = payload.decode()
        if len(content) > self._max_bytes or head_of(content) is None:
            return
        self.store.put(key, content, filename="", purpose=PURPOSE, media_type=media_type, name=uuid)
        self._recent.replace((key, uuid), (payload.content_id, now))


def _held(images: list[NamedImage]) -> Iterator[tuple[NamedImage, str, placeholders.Payload | str]]:
    """Those with their content, each with its media type, and what is there of its content."""
    for one in images:
        head, _, text = (one.url or "").partition(";base64,")
        if text and head.startswith("data:image/"):
            yield one, head.removeprefix("data:"), placeholders.resolve(text) or text
