# SPDX-License-Identifier: Apache-2.0
"""Files of clients, in a directory, S3, Redis, or wherever else fsspec can write. API server process, any thread.

A file's id is the digest of its content under its tenant's key, so that the same bytes have the same id, and nobody can
say what an id of another tenant stands for. It lies below its tenant's folder, in two objects, of which the content's
has one of two names:

    v1/TENANT/NAME          the content
    v1/TENANT/NAME.DIGEST   the content of a file that is found by another name than its id
    v1/TENANT/NAME.json     what is said of it (FileInfo); a file is there as long as this is

A name that is not the file's id may be given to other content. That is one write, of what is said of it, and requests
that have found the former content can read it for a while.

Content is written before what is said of it, and removed after it, so that what is found is whole. It is compared with
its id when it is read. With a store key, both are encrypted, and names are keyed. Nothing is kept in this process, so
that a file that one server removes is gone for all.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
from blake3 import blake3
from fsspec.implementations.local import LocalFileSystem
from pydantic import TypeAdapter, ValidationError

from vllm_mmcache.base import background, tenant
from vllm_mmcache.base.errors import FilesUnusable, StoreCorrupt
from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.base.store_url import REMOTE_SCHEMES, error_without_secrets, redact
from vllm_mmcache.files.access import Access
from vllm_mmcache.storage import encryption

logger = logging.getLogger("vllm.mmcache")

PREFIX = "file-"
SWEEP_S = 3600.0
FULL_SWEEP_S = 60.0
"""A tenant whose quota is used up has its expired files removed at once, but not more often than this."""
ENTRY_BYTES = 65536
"""Charged to a tenant's quota for each file, beside its content. So it bounds how many there are to be listed, too."""
CALL_S, LONGEST_S = 10.0, 60.0
"""The longest that a place may take to read, find or remove a file; and to list a tenant's files, or to write one, for
which files may be listed and expired ones removed."""
HELD_S = 5.0
"""How long a server goes by what a tenant's files took when it last listed them, and by what it has written since."""
MOST_OFF_S = 60.0
"""A server whose clock differs by more from that of the place removes no expired files."""
_COMMON = bytes(32)
_INFO = ".json"
_VERSION = "v1"
"""Of how files are kept: the folder that holds the tenants' folders."""
_ABANDONED_S = 86400.0
"""Content without a FileInfo that is older was left by a server that ended while it wrote."""
_REPLACED_S = 600.0
"""How long content stays whose name was given to other content: requests under way may read it."""
_SWEPT_BYTES = 128
_MOST_SWEPT = Budget(4096, 4096 * _SWEPT_BYTES)
"""Of the tenants whose expired files were removed lately; and of those whose files were listed lately."""
_NOTES = "notes"
"""A folder beside the tenants' folders: what the servers that share a place tell each other."""
_ALONE_BYTES = 512
_MOST_ALONE = Budget(65536, 65536 * _ALONE_BYTES)
"""Of content that belongs to no file, where listings have no times: since when a sweep has found it so."""


@dataclass(frozen=True)
class FileInfo:
    """What is said of a file. Units: seconds since the epoch; expires_s is None for ever."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int | None
    media_type: str
    is_named: bool = False
    """Whether it is found by another name than its id."""

    @property
    def content_id(self) -> bytes:
        """The digest of its content under its tenant's key."""
        return bytes.fromhex(self.id.removeprefix(PREFIX))


_INFO_JSON = TypeAdapter(FileInfo)


class QuotaExceeded(Exception):
    """A tenant's files would take more than they may."""


class FileLost(Exception):
    """The content of a file is gone or damaged, although its FileInfo is there."""


@dataclass(eq=False)
class _Listing:
    """A tenant's files are being listed: what they take once that is known, and what was written meanwhile."""

    key: bytes
    num_bytes: int | None = None
    kept_bytes: int = 0


class FileStore:
    """Files by tenant and id. tenant_key, in all methods: tenant.key_of a request's salt.

    Every method raises FilesUnusable where the place does not serve. It is then left alone for a while, and the log
    says so. A place that takes nothing any more, since it is full or can't be written to, goes on being read.

    A place may hang. Call a method through `reading.wait_for` or `writing.wait_for` to bound the wait; called directly,
    it may take for ever.
    """

    def __init__(self, filesystem: Any, root: str, *, codec: encryption.PlainCodec, ttl_s: int, quota: int) -> None:
        self._files = filesystem
        self._root = f"{root.rstrip('/')}/{_VERSION}"
        self._sweep_note = f"{self._root}/{_NOTES}/swept"
        """When a server has last begun to sweep, in seconds since the epoch."""
        self._codec = codec
        self._ttl_s = ttl_s
        self._quota = quota
        self.reading = Access("reading", CALL_S)
        self.writing = Access("writing", CALL_S)
        self._removing = Access("removing", CALL_S)  # what has expired; of a place that is full, this is what helps
        self._swept = time.monotonic()
        self._off_s = 0.0
        """By how much this machine's clock was fast, compared with that of the place, when that was last seen."""
        self._swept_of: LruTable[bytes, float] = LruTable(lambda: _MOST_SWEPT, _SWEPT_BYTES)  # by tenant
        self._sweeping = threading.Lock()
        self._held_of: LruTable[bytes, tuple[float, int]] = LruTable(lambda: _MOST_SWEPT, _SWEPT_BYTES)
        """By tenant, when its files were listed, and what they take as far as this process knows."""
        self._listings: list[_Listing] = []
        self._reserving = threading.Lock()
        self._in_flight: list[tuple[str, int]] = []  # content that is being written: its path, and what it counts for
        self._alone: LruTable[str, float] = LruTable(lambda: _MOST_ALONE, _ALONE_BYTES)  # since when, by path

    @classmethod
    def of(cls, settings: Settings, below: str = "") -> "FileStore":
        """The files that these settings ask for; or others in a folder below them, with a quota of their own.

        Raises: FilesUnusable for a place that can't be opened; SettingsError for a key that can't be used.
        """
        assert settings.files is not None
        codec = encryption.of(settings.store_key_file)
        if settings.files.startswith(REMOTE_SCHEMES):
            from vllm_mmcache.files.redis_filesystem import RedisFileSystem

            root = f"files/{below}" if below else "files"
            filesystem = RedisFileSystem(settings.files, f"{root}/{_VERSION}", int(settings.files_ttl))
        else:
            filesystem, root = cls._opened(settings.files, below)
        kept = cls(filesystem, root, codec=codec, ttl_s=int(settings.files_ttl), quota=settings.files_quota)
        for access in (kept.reading, kept.writing, kept._removing):
            access.place = settings.files
        return kept

    @staticmethod
    def _opened(place: str, below: str) -> tuple[Any, str]:
        """The file system of a directory or of a URL of fsspec, and the folder in it. Raises: FilesUnusable."""
        try:
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            filesystem, root = fsspec.core.url_to_fs(place, **options)
            if isinstance(filesystem, LocalFileSystem):
                Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
        except (ImportError, ValueError, OSError) as error:
            said = error_without_secrets(error, place)
            raise FilesUnusable(f"MMCACHE_FILES {redact(place)!r} can't be opened: {said}") from None
        return filesystem, f"{root.rstrip('/')}/{below}" if below else root

    def put(
        self,
        tenant_key: bytes | None,
        content: bytes,
        *,
        filename: str,
        purpose: str,
        media_type: str,
        expires_after_s: int | None = None,
        name: str | None = None,
    ) -> FileInfo:
        """Keep a file. One with the same content takes the filename, the purpose and the time of this one.

        name: what it is found by, in place of its id; a former file of that name is not found any more. Raises:
        QuotaExceeded.
        """
        now = int(time.time())
        lives_s = min((seconds for seconds in (expires_after_s, self._ttl_s or None) if seconds), default=None)
        file_id = PREFIX + tenant.digest(content, tenant_key).hex()
        expires_s = None if lives_s is None else now + lives_s
        info = FileInfo(file_id, filename, purpose, len(content), now, expires_s, media_type, name is not None)
        info_path = self._info_path(tenant_key, name or file_id)
        content_path = self._content_path(info_path, info)
        said, needed = _INFO_JSON.dump_json(info), len(content) + ENTRY_BYTES
        self._sweep_sometimes()
        with self.writing.serving(QuotaExceeded), self._reserved(content_path, needed) as reserved:
            self._make_room(tenant_key, content_path, len(content), reserved)
            self._write(content_path, content)
            self._write(info_path, said)
            self._note_held(tenant_key, needed)
        return info

    def find(self, tenant_key: bytes | None, file_id: str) -> FileInfo | None:
        """What is said of a file; None for one that is not there, has expired, or is another tenant's."""
        info = self.find_named(tenant_key, file_id) if _is_id(file_id) else None
        return info if info is not None and info.id == file_id else None

    def find_named(self, tenant_key: bytes | None, name: str) -> FileInfo | None:
        """As `find`, for a file that was kept under a name."""
        with self.reading.serving():
            info = self._info(self._info_path(tenant_key, name))
        return None if info is None or _is_over(info) else info

    def read(self, tenant_key: bytes | None, info: FileInfo, name: str | None = None) -> bytes:
        """The content of a file. Raises: FileLost."""
        with self.reading.serving():
            content = self._read(self._content_path(self._info_path(tenant_key, name or info.id), info))
        if content is None or tenant.digest(content, tenant_key) != info.content_id:
            raise FileLost(f"the content of {info.id} is {'gone' if content is None else 'damaged'}: upload it again")
        return content

    def files_of(self, tenant_key: bytes | None) -> list[FileInfo]:
        """The files of a tenant, the latest first."""
        with self.reading.serving():
            found = self._infos([path for path, _ in self._objects(self._folder(tenant_key)) if path.endswith(_INFO)])
        there = [info for info in found.values() if not _is_over(info)]
        return sorted(there, key=lambda info: (info.created_s, info.id), reverse=True)

    def delete(self, tenant_key: bytes | None, file_id: str) -> bool:
        """Remove a file for good. Returns whether it was there."""
        info = self.find(tenant_key, file_id)
        if info is not None:
            with self.writing.serving():
                path = self._info_path(tenant_key, file_id)
                self._remove(path, self._content_path(path, info))
                self._held_of.remove(tenant_key or _COMMON)
        return info is not None

    def forget_name(self, tenant_key: bytes | None, name: str) -> None:
        """Have a name stand for nothing. Its content stays for a while, as that of a name that is given anew does."""
        with self.writing.serving():
            self._remove(self._info_path(tenant_key, name))

    def sweep(self) -> int:
        """Remove what has expired, of all tenants, and content that is no file's any more. Returns how many files."""
        with self._removing.serving():
            folders = self._files.ls(self._root, detail=False) if self._files.exists(self._root) else []
            tenants = [folder for folder in folders if folder.rpartition("/")[2] != _NOTES]
            return sum(map(self._sweep_folder, tenants)) if tenants and self._is_clock_right() else 0

    def _sweep_folder(self, folder: str) -> int:
        objects = dict(self._objects(folder))
        info_paths = [path for path in objects if path.endswith(_INFO)]
        said = dict.fromkeys(info_paths) | self._infos(info_paths)  # None for what can't be read
        removed = 0
        for path, entry in objects.items():
            info = said.get(path)
            paths: tuple[str, ...] = ()
            if info is not None:
                # What was uploaded since is there again.
                if _is_over(info) and _is_over(self._info(path) or info):
                    paths = path, self._content_path(path, info)
            elif path not in said and self._is_orphan(path, entry, said):
                paths = (path,)
            self._remove(*paths)
            removed += bool(paths)
        return removed

    def _is_orphan(self, path: str, entry: dict[str, Any], said: dict[str, FileInfo | None]) -> bool:
        """Whether content belongs to no file, and has for so long that a write or a read of it should have ended.

        entry: what the place's listing says of it. said: the folder's FileInfos by path, with None where one can't be
        read.
        """
        folder, _, name = path.rpartition("/")
        info_path = f"{folder}/{name.partition('.')[0]}{_INFO}"
        info = said.get(info_path)
        if (info is None and info_path in said) or self._is_content_of(path, info_path, info):
            self._alone.remove(path)
            return False
        written = entry.get("mtime") or entry.get("LastModified")
        seconds: Any = written.timestamp() if isinstance(written, datetime) else written
        since = seconds if isinstance(seconds, int | float) else self._alone.admit(path, time.time())
        if info is not None:
            since = max(since, info.created_s)
        if time.time() - since <= (_ABANDONED_S if info is None else _REPLACED_S):
            return False
        return not self._is_content_of(path, info_path, self._info(info_path))

    def _is_content_of(self, path: str, info_path: str, info: FileInfo | None) -> bool:
        return info is not None and path == self._content_path(info_path, info)

    def _sweep_of(self, tenant_key: bytes | None) -> int:
        """As `sweep`, of one tenant, which was not done lately. Returns how many files were removed."""
        key, now = tenant_key or _COMMON, time.monotonic()
        if now - (self._swept_of.get(key) or -FULL_SWEEP_S) < FULL_SWEEP_S:
            return 0
        self._swept_of.replace(key, now)
        return self._sweep_folder(self._folder(tenant_key)) if self._is_clock_right() else 0

    def _is_clock_right(self) -> bool:
        """Whether this machine's clock is that of the place, as far as it has one; otherwise the log says so.

        A machine whose clock is fast would remove files that nobody else takes for expired.
        """
        path = f"{self._root}/{_NOTES}/{uuid4().hex}"
        with contextlib.suppress(Exception):  # of a place that has no clock, keeps it to itself, or is full
            self._write(path, b"")
            try:
                self._off_s = time.time() - self._files.modified(path).timestamp()
            finally:
                self._remove(path)
        if abs(self._off_s) > MOST_OFF_S:
            logger.warning(
                "mmcache removes no expired files of clients: this machine's clock differs by %d s from that of the "
                "place where they are (MMCACHE_FILES). Set the clock",
                self._off_s,
            )
        return abs(self._off_s) <= MOST_OFF_S

    def _sweep_sometimes(self) -> None:
        with self._sweeping:
            if time.monotonic() - self._swept < SWEEP_S:
                return
            self._swept = time.monotonic()
        threading.Thread(target=self._sweep_behind, name="mmcache-files", daemon=True).start()

    def _sweep_behind(self) -> None:
        background.lower_priority()
        try:
            if self._is_first_to_sweep():
                self.sweep()
        except FilesUnusable:  # the log has it
            with contextlib.suppress(Exception):
                self._remove(self._sweep_note)
            with self._sweeping:
                self._swept = time.monotonic() - SWEEP_S + FULL_SWEEP_S

    def _is_first_to_sweep(self) -> bool:
        """Whether no server that shares the place has begun a sweep for SWEEP_S; then it is noted that this one has.

        A server whose clock is wrong does not sweep, and so notes nothing.
        """
        now = time.time()
        with self._removing.serving():
            if not self._is_clock_right():
                return False
            with contextlib.suppress(ValueError):  # of a note that is damaged
                if abs(now - float(self._read(self._sweep_note) or b"-inf")) < SWEEP_S:
                    return False
            with contextlib.suppress(Exception):  # of a place that is full, which needs it most
                self._write(self._sweep_note, b"%d" % now)
        return True

    def _make_room(self, tenant_key: bytes | None, but: str, num_bytes: int, reserved: dict[str, int]) -> None:
        """See that a tenant may have one more file of so many bytes; `but` and `reserved` as in _held_bytes.

        What the tenant has is listed where this process has not done so for HELD_S, and before an upload is refused.
        Raises: QuotaExceeded.
        """
        key, now, needed = tenant_key or _COMMON, time.monotonic(), num_bytes + ENTRY_BYTES
        listed, held = self._held_of.get(key) or (-HELD_S, 0)
        if now - listed < HELD_S and held + sum(reserved.values()) + needed <= self._quota:
            return
        with self._listed(key) as listing:
            there = self._held_bytes(tenant_key, but, reserved)
            if there + needed > self._quota and self._sweep_of(tenant_key):
                there = self._held_bytes(tenant_key, but, reserved)
            if there + needed > self._quota:
                raise QuotaExceeded(
                    f"{there} of {self._quota} bytes are in use, and the file has {num_bytes} and {ENTRY_BYTES} more"
                )
            listing.num_bytes = there

    @contextlib.contextmanager
    def _listed(self, key: bytes) -> Iterator[_Listing]:
        """A tenant's files are listed in this block, which sets the listing's num_bytes; it is remembered afterwards.

        What this process has kept meanwhile counts beside it, some of it twice. That does no harm: no upload is refused
        before its tenant's files are listed anew.
        """
        listing = _Listing(key)
        with self._reserving:
            self._listings.append(listing)
        try:
            yield listing
        finally:
            with self._reserving:
                self._listings.remove(listing)
                if listing.num_bytes is not None:
                    self._held_of.replace(key, (time.monotonic(), listing.num_bytes + listing.kept_bytes))

    def _note_held(self, tenant_key: bytes | None, num_bytes: int) -> None:
        """Count what was written beside what was listed."""
        key = tenant_key or _COMMON
        with self._reserving:
            if (held := self._held_of.get(key)) is not None:
                self._held_of.replace(key, (held[0], held[1] + num_bytes))
            for listing in self._listings:
                if listing.key == key:
                    listing.kept_bytes += num_bytes

    @contextlib.contextmanager
    def _reserved(self, path: str, num_bytes: int) -> Iterator[dict[str, int]]:
        """Count content against the quota while it is written.

        Yields the bytes of the tenant's other content that this process was writing already, by path.
        """
        folder, own = path.rpartition("/")[0], (path, num_bytes)
        with self._reserving:
            before = {other: size for other, size in self._in_flight if other.startswith(folder) and other != path}
            self._in_flight.append(own)
        try:
            yield before
        finally:
            with self._reserving:
                self._in_flight.remove(own)

    def _held_bytes(self, tenant_key: bytes | None, but: str, reserved: dict[str, int]) -> int:
        """What a tenant's files take beside the one at `but`: those that are there, and those that others write."""
        counted = but, *reserved  # also where they have another name while they are written
        there: int = sum(
            entry["size"] + ENTRY_BYTES
            for path, entry in self._objects(self._folder(tenant_key))
            if not path.endswith(_INFO) and not path.startswith(counted)
        )
        return there + sum(reserved.values())

    def _folder(self, tenant_key: bytes | None) -> str:
        return f"{self._root}/{self._codec.name(tenant_key or _COMMON).hex()}"

    def _info_path(self, tenant_key: bytes | None, name: str) -> str:
        named = blake3((tenant_key or _COMMON) + name.encode("utf-8", "surrogatepass")).digest()
        return f"{self._folder(tenant_key)}/{self._codec.name(named).hex()}{_INFO}"

    def _objects(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            entries = self._files.ls(folder, detail=True)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry["type"] == "file":
                yield f"{folder}/{entry['name'].rpartition('/')[2]}", entry

    def _info(self, path: str) -> FileInfo | None:
        return self._infos([path]).get(path)

    def _infos(self, paths: list[str]) -> dict[str, FileInfo]:
        """What is said of files, by the path of its object; those that are not there, or not ours, are left out."""
        found = {}
        for path, stored in self._stored(paths).items():
            with contextlib.suppress(StoreCorrupt, ValidationError):
                found[path] = _INFO_JSON.validate_json(self._codec.decrypt_bytes(_bound_to(path), stored))
        return found

    def _read(self, path: str) -> bytes | None:
        with contextlib.suppress(StoreCorrupt):
            for stored in self._stored([path]).values():
                return self._codec.decrypt_bytes(_bound_to(path), stored)
        return None

    def _stored(self, paths: list[str]) -> dict[str, bytes]:
        """Objects as they are stored, by path, those that are there: of S3, many at once."""
        found = {}
        for path, stored in zip(paths, self._files.cat_ranges(paths, None, None, on_error="return"), strict=True):
            if isinstance(stored, bytes):
                found[path] = stored
            elif not isinstance(stored, FileNotFoundError):
                raise stored
        return found

    def _write(self, path: str, content: bytes) -> None:
        """Write an object as a whole: in a directory under another name first, which is its name once all is there."""
        stored = self._codec.encrypt_bytes(_bound_to(path), content)
        folder = path.rpartition("/")[0]
        if not isinstance(self._files, LocalFileSystem):
            self._files.makedirs(folder, exist_ok=True)
            self._files.pipe_file(path, stored)
            return
        _make_private(Path(folder))
        incoming = f"{path}.{uuid4().hex}"
        try:
            self._files.pipe_file(incoming, stored)
            self._files.mv(incoming, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.rm_file(incoming)
            raise

    def _remove(self, *paths: str) -> None:
        for path in paths:
            self._alone.remove(path)
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)

    def _content_path(self, info_path: str, info: FileInfo) -> str:
        """Where the content is of which this is said there."""
        path = info_path.removesuffix(_INFO)
        return f"{path}.{self._codec.name(info.content_id).hex()}" if info.is_named else path


def _bound_to(path: str) -> bytes:
    """What an encrypted object is bound to, so that none can take another's place."""
    return blake3("/".join(path.rsplit("/", 2)[1:]).encode()).digest()


def _is_id(text: str) -> bool:
    digits = text.removeprefix(PREFIX)
    return text.startswith(PREFIX) and len(digits) == 64 and not set(digits) - set("0123456789abcdef")


def _is_over(info: FileInfo) -> bool:
    return info.expires_s is not None and info.expires_s <= time.time()


def _make_private(folder: Path) -> None:
    """Make a directory, and those above it that are not there, for this user alone."""
    if not folder.is_dir():
        for one in [*reversed(folder.parents), folder]:
            if not one.exists():
                one.mkdir(mode=0o700, exist_ok=True)
