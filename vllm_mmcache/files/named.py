# SPDX-License-Identifier: Apache-2.0
"""Images that clients name by a uuid, saved where all replicas find them. API server process, event loop.

A client that has sent an image with a uuid to one replica may send the uuid alone to another one, which then finds the
image in the store that they share. Only the client's own tenant finds it. Images are written in threads of the store
while their request is answered, and the request waits for that at its end, so that the other replica finds them when
the client sends the next request. None of this is certain: where an image was not saved or is not found, the replica
answers that the uuid is unknown, as it does without a shared store, and the client sends the image again.

A client may give a uuid to another image, on any replica. So a uuid is looked for in the store at each request, also
where this replica knows it, unless the uuid is the digest of its image (content/content_name.py). And where the image
that comes with a uuid can't be saved, or its request is refused, the store has nothing under the uuid any more.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, LruTable, Size
from vllm_mmcache.content import content_name, placeholders
from vllm_mmcache.content.base64_image import Base64Image
from vllm_mmcache.files.image_file import head_of
from vllm_mmcache.files.references import NamedImage
from vllm_mmcache.files.store import LONGEST_S, FileInfo, FileStore, QuotaExceeded
from vllm_mmcache.metrics import table_sizes

PURPOSE = "uuid"
MOST_UNWRITTEN = 64
"""The most images that this process writes, or has in line to be written; further ones are not saved."""
MOST_LOOKED_FOR = 1024
"""Uuids of one request that are looked for; further ones are taken for unknown."""
LINGER_S = 5.0
"""How long an answered request waits for its images at most. What is not written then is written all the same."""
RENEW_S = 3600.0
"""An image that comes again with the same uuid is not written again by the same process for so long, if it still is
what the store has. Then it is, so that it does not expire; other content under the uuid is always written at once."""
ENTRY_BYTES = 1024  # a uuid of MAX_UUID_CHARS included, whatever its characters
MOST_REMEMBERED = Budget(65536, 65536 * ENTRY_BYTES)
"""Of what this process has written, or could not write."""
NOT_SAVED = b""
"""In the place of a content id: what this process was sent last with a uuid is not in the store."""


@dataclass
class Saving:
    """The images of one request, while they are saved."""

    is_refused: bool = False
    """Whether the request was not answered: what it said of its uuids is not to be believed."""


class NamedImages:
    """Images by tenant and uuid. salt and key, in all methods: of the tenant, and None for requests without one.

    is_known: says of a uuid and a salt whether this replica knows the image without looking in the store. max_bytes: of
    a file; larger ones are not saved. formats: those that are saved, by Pillow's names; all if None.
    """

    def __init__(
        self,
        store: FileStore,
        is_known: Callable[[str, str | None], bool],
        max_bytes: int,
        formats: tuple[str, ...] | None = None,
    ) -> None:
        self.store = store
        self._is_known = is_known
        self._max_bytes = max_bytes
        self._formats = formats
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
        """What the store has of those images that came as a uuid alone, and of which it may have a newer one.

        At most MOST_LOOKED_FOR uuids are looked for, and none that the request itself gives to an image, unless it is
        the digest of its image, which can mean no other one. Nothing is found where the store can't be reached.
        """
        given = {one.uuid for one in images if one.url is not None and not content_name.is_claim(one.uuid)}
        alone = [one for one in images if one.url is None and one.uuid not in given]
        wanted = [uuid for uuid in dict.fromkeys(one.uuid for one in alone) if not self._is_newest(uuid, salt, key)]
        wanted = wanted[:MOST_LOOKED_FOR]
        try:
            found = await asyncio.gather(
                *(self.store.reading.wait_for_async(self.store.find_named, key, uuid) for uuid in wanted)
            )
        except FilesUnusable:
            return []
        infos = dict(zip(wanted, found, strict=True))
        return [(one, info) for one in alone if (info := infos.get(one.uuid)) is not None]

    def _is_newest(self, uuid: str, salt: str | None, key: bytes | None) -> bool:
        """Whether this replica knows the uuid, and the store has no newer image for it, as far as this replica knows.

        That is so for digests of images, and where the last image with the uuid came here and could not be saved.
        """
        if not self._is_known(uuid, salt):
            return False
        content_id, _ = self._written.get((key, uuid)) or (None, 0.0)
        return content_name.is_claim(uuid) or content_id == NOT_SAVED

    @contextlib.asynccontextmanager
    async def saving(
        self, images: list[NamedImage], key: bytes | None, *, writes: bool = True
    ) -> AsyncIterator["Saving"]:
        """Saves those images that came with their content, while their request is answered in this block.

        writes: whether this request may write at all. Yields what is to be told that the request is refused.
        """
        saving = Saving()
        given = {one.uuid: one for one in images if one.url is not None}  # of several with one uuid, the last
        tasks = [
            asyncio.ensure_future(self._save(uuid, _content_of(one), key, writes=writes)) for uuid, one in given.items()
        ]
        try:
            yield saving
        finally:
            if saving.is_refused and writes:
                tasks.append(asyncio.ensure_future(self._take_back(given, tasks[:], key)))
            if tasks:
                await asyncio.wait(tasks, timeout=LINGER_S)

    async def _save(
        self, uuid: str, image: placeholders.Payload | str | None, key: bytes | None, *, writes: bool
    ) -> None:
        """Save one image, None for one that came without its content; or have the store know that it has not got it."""
        if not writes or self._num_unwritten >= MOST_UNWRITTEN:
            self._note(key, uuid, NOT_SAVED)
            return
        self._num_unwritten += 1
        with failsafe("files"):
            try:
                await self.store.writing.wait_for_async(self._write, uuid, image, key, longest_s=LONGEST_S)
            except FilesUnusable:
                pass  # a replica that is asked for the uuid alone does not find it
            finally:
                self._num_unwritten -= 1

    async def _take_back(self, uuids: Iterable[str], saving: Sequence[asyncio.Future[None]], key: bytes | None) -> None:
        """Have the store know nothing of these uuids, once their images are saved: vLLM did not take them."""
        if saving:
            await asyncio.wait(saving)
        for uuid in uuids:
            content_id, _ = self._written.get((key, uuid)) or (NOT_SAVED, 0.0)
            if content_id != NOT_SAVED and not content_name.is_claim(uuid):
                await self._save(uuid, None, key, writes=True)

    def _write(self, uuid: str, image: placeholders.Payload | str | None, key: bytes | None) -> None:
        """Write one image, unless it was written lately. A uuid whose image can't be written is not found any more.

        image: None for one that came without its content. Raises: FilesUnusable.
        """
        payload = Base64Image(image.encode("ascii", "replace"), key) if isinstance(image, str) else image
        content_id, written = self._written.get((key, uuid)) or (NOT_SAVED, 0.0)
        is_fresh = payload is not None and content_id == payload.content_id and time.monotonic() - written < RENEW_S
        if is_fresh and (content_name.is_claim(uuid) or self._is_saved(key, uuid, content_id)):
            return
        self._note(key, uuid, NOT_SAVED)
        with contextlib.suppress(QuotaExceeded, ValueError):
            if payload is not None and self._put(uuid, payload, key):
                self._note(key, uuid, payload.content_id)
                return
        if not content_name.is_claim(uuid):
            self.store.forget_name(key, uuid)

    def _put(self, uuid: str, payload: placeholders.Payload, key: bytes | None) -> bool:
        """Write one image, unless it is too large, can't be opened, or its uuid claims to be another one's digest.

        Returns whether it was written. Raises: ValueError for text that is no base64, and what FileStore.put does.
        """
        content = payload.decode()
        if len(content) > self._max_bytes or (content_name.is_claim(uuid) and content_name.name_of(content) != uuid):
            return False
        head = head_of(content, self._formats)
        if head is not None:
            self.store.put(key, content, filename="", purpose=PURPOSE, media_type=head.media_type, name=uuid)
        return head is not None

    def _is_saved(self, key: bytes | None, uuid: str, content_id: bytes) -> bool:
        """Whether the store has this content under the uuid; another replica may have been sent another one."""
        info = self.store.find_named(key, uuid)
        return info is not None and info.content_id == content_id

    def _note(self, key: bytes | None, uuid: str, content_id: bytes) -> None:
        self._written.replace((key, uuid), (content_id, time.monotonic()))


def _content_of(image: NamedImage) -> placeholders.Payload | str | None:
    """The base64 text of an image that came as a data URL; None for any other.

    Where image_extraction has taken the text out of the body, it is in a payload.
    """
    head, _, text = image.url.partition(";base64,") if isinstance(image.url, str) else ("", "", "")
    if not text or not head.startswith("data:image/"):
        return None
    return placeholders.resolve(text) or text
