# SPDX-License-Identifier: Apache-2.0
"""Images that clients name by a uuid, saved where all replicas find them. API server process, event loop.

A client that has sent an image with a uuid to one replica may send the uuid alone to another one, which then finds the
image in the store that they share. Only the client's own tenant finds it. Images are written in threads of the store
while their request is answered, and the request waits for that at its end, so that the other replica finds them when
the client sends the next request. None of this is certain: where an image was not saved or is not found, the replica
answers that the uuid is unknown, as it does without a shared store, and the client sends the image again.

A client may give a uuid to another image, on any replica. So a uuid is looked for in the store at each request, also
where this replica knows it, unless the uuid is the digest of its image (content/content_name.py). And where the image
that comes with a uuid can't be saved, or its request is refused, the store forgets the uuid; unless it can't be
reached, the request may not write, or too many saves wait. Then this replica alone knows better.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

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
        self._numbers = itertools.count(1)
        # tenant and uuid -> number of the last save that was asked for
        self._latest: LruTable[tuple[bytes | None, str], int] = LruTable(lambda: MOST_REMEMBERED, ENTRY_BYTES)
        self._locks: WeakValueDictionary[tuple[bytes | None, str], asyncio.Lock] = WeakValueDictionary()
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

        writes: whether this request may write at all. Yields a Saving, to be told if the request is refused. An
        Exception in the block counts as a refusal, and a cancellation does not.
        """
        saving = Saving()
        given = {one.uuid: one for one in images if one.url is not None}  # of several with one uuid, the last
        saves: dict[str, tuple[int, asyncio.Task[bool]]] = {}
        for uuid, one in given.items():
            number = next(self._numbers)
            self._latest.replace((key, uuid), number)
            saves[uuid] = number, asyncio.create_task(self._save(uuid, _content_of(one), key, number, writes=writes))
        tasks: list[asyncio.Task[Any]] = [task for _, task in saves.values()]
        try:
            yield saving
        except Exception:
            saving.is_refused = True
            raise
        finally:
            if saving.is_refused:
                tasks.append(asyncio.create_task(self._forget_written(saves, key)))
            if tasks:
                await asyncio.wait(tasks, timeout=LINGER_S)

    async def _save(
        self, uuid: str, image: placeholders.Payload | str | None, key: bytes | None, number: int, *, writes: bool
    ) -> bool:
        """Save one image. One that can't be written is forgotten: the store has nothing under its uuid then.

        image: None to have the uuid forgotten, since no content came or the request was refused. Where this request may
        not write, or too many saves wait, only this process notes that the image is not saved, and the store keeps what
        it had. Saves of one uuid are made one at a time, in the order of their requests; one is skipped if a later
        request has given the uuid to an image. number: of this save. Returns whether the image was written.
        """
        if not writes or self._num_unwritten >= MOST_UNWRITTEN:
            self._note(key, uuid, NOT_SAVED)
            return False
        self._num_unwritten += 1
        is_written = False
        try:
            async with self._locks.setdefault((key, uuid), asyncio.Lock()):
                if self._is_latest(key, uuid, number):
                    with failsafe("files"), contextlib.suppress(FilesUnusable):
                        is_written = await self.store.writing.wait_for_async(
                            self._write, uuid, image, key, number, longest_s=LONGEST_S
                        )
        finally:
            self._num_unwritten -= 1
        return is_written

    async def _forget_written(self, saves: Mapping[str, tuple[int, asyncio.Task[bool]]], key: bytes | None) -> None:
        """Have the store forget the uuids that a refused request has written, but those that are digests of images.

        One whose image had been saved before stays. What it stood for earlier does not come back.
        """
        for uuid, (number, task) in saves.items():
            if await task and not content_name.is_claim(uuid):
                await self._save(uuid, None, key, number, writes=True)

    def _is_latest(self, key: bytes | None, uuid: str, number: int) -> bool:
        """Whether no later request has given the uuid to an image, as far as this process knows."""
        return (self._latest.get((key, uuid)) or number) <= number

    def _write(self, uuid: str, image: placeholders.Payload | str | None, key: bytes | None, number: int) -> bool:
        """Write one image, unless it was written lately. A uuid whose image can't be written is not found any more.

        image: None for one that came without its content. Returns whether it was written. Raises: FilesUnusable.
        """
        content_id, written = self._written.get((key, uuid)) or (NOT_SAVED, 0.0)
        with contextlib.suppress(QuotaExceeded, ValueError):
            payload = Base64Image(image.encode("ascii", "replace"), key) if isinstance(image, str) else image
            if payload is not None:
                is_fresh = content_id == payload.content_id and time.monotonic() - written < RENEW_S
                if is_fresh and (content_name.is_claim(uuid) or self._is_saved(key, uuid, content_id)):
                    return False
                self._note(key, uuid, NOT_SAVED)
                if self._put(uuid, payload, key):
                    if self._is_latest(key, uuid, number):
                        self._note(key, uuid, payload.content_id)
                    return True
        self._note(key, uuid, NOT_SAVED)
        if not content_name.is_claim(uuid):
            self.store.forget_name(key, uuid)
        return False

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
