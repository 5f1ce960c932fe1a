# SPDX-License-Identifier: Apache-2.0
"""What is known about image bytes that were decoded once: size, mode, settings, mm_hashes. No pixels.

API server process, any thread. A record exists only for bytes that decoded successfully under the same settings, so
an image that is known would decode again. The table is bounded by entries and bytes; what a decode says is also kept
as a record (vllm_mmcache.storage.record_store) with the mm_hashes, so that a restart and other servers know it.
"""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

import msgspec
from msgspec import Meta

from vllm_mmcache.base import settings
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.metrics import table_sizes
from vllm_mmcache.storage import frame, record_store

MAX_MM_HASHES = 16  # per record: a server sees one or two (model, processor arguments) per image
RECORD_COST_BYTES = 6144  # a record with all its mm_hashes; test_lru.py measures it
FORMAT = 2  # of what is kept; any other is a miss
MAX_PIXELS = 1 << 30  # of an image that is kept; vLLM takes no more than 179 million by itself (VLLM_MAX_IMAGE_PIXELS)

# Pillow's, and that of a video's record.
Mode = Literal[
    "1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F",
    "I;16", "I;16L", "I;16B", "I;16N", "video",
]  # fmt: skip
Name = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=16384)]
Number = Annotated[int, Meta(ge=-(1 << 40), le=1 << 40)]
Side = Annotated[int, Meta(ge=1, le=MAX_PIXELS)]
_Plain = bool | Number | float | Text | None
_Nested = _Plain | Annotated[list[_Plain], Meta(max_length=64)]
_Setting = _Plain | Annotated[list[_Nested], Meta(max_length=64)]
# What vLLM's hasher gives: hex digits.
_MmHash = Annotated[str, Meta(pattern="^[0-9a-f]{32,128}\\Z")]
_Question = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=9)]


class _Kept(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    width: Side
    height: Side
    mode: Mode
    io_config: Annotated[dict[Name, _Setting], Meta(max_length=16)] | None
    mm_hashes: Annotated[list[tuple[_Question, _MmHash]], Meta(max_length=MAX_MM_HASHES)]


_DECODER = msgspec.json.Decoder(_Kept)


class Key(NamedTuple):
    """The bytes and everything else that the decoded image depends on."""

    content_id: bytes
    options: tuple[Hashable, ...]


@dataclass
class MediaInfo:
    """One known image. Units: size is (width, height) in pixels, after conversion and rotation."""

    size: tuple[int, int]
    mode: str
    io_config: dict[str, Any] | None
    name: bytes | None = None
    """The key of the record that is kept of it; None for one that is not kept."""
    _mm_hashes: dict[Hashable, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept_s: float = field(default_factory=time.monotonic)

    def mm_hash(self, question: Hashable) -> str | None:
        """The mm_hash that vLLM gave it, or None; `question` stands for everything else that is hashed with it."""
        return self._mm_hashes.get(question)

    def keep_mm_hash(self, question: Hashable, mm_hash: str) -> None:
        """Remember the answer; the oldest goes when there are too many."""
        with self._lock:
            self._mm_hashes[question] = mm_hash
            if len(self._mm_hashes) > MAX_MM_HASHES:
                del self._mm_hashes[next(iter(self._mm_hashes))]
        self.keep()

    def keep(self) -> None:
        """Have all of this kept where records are."""
        self._kept_s = time.monotonic()
        with failsafe("media records"):
            value = None if self.name is None else self.packed()
            if self.name is not None and value is not None:
                record_store.current().put(self.name, value)

    def renew(self) -> None:
        """Keep it again if that was long ago: what is used must not go as one of the oldest."""
        if time.monotonic() - self._kept_s > record_store.current().renew_s:
            self.keep()

    def packed(self) -> bytes | None:
        """The record as bytes that `unpacked` makes an equal one of; None where it does not."""
        with self._lock:
            mm_hashes = [(question, mm_hash) for question, mm_hash in self._mm_hashes.items() if _is_text(question)]
        try:
            packed = msgspec.json.encode((FORMAT, *self.size, self.mode, self.io_config, mm_hashes))
        except (TypeError, ValueError):
            return None
        again = unpacked(packed)
        same = again and (again.size, again.mode, again.io_config) == (self.size, self.mode, self.io_config)
        return packed if same else None


def _budget() -> Budget:
    return Budget(settings.current().media_records, settings.current().media_records_bytes)


Table = LruTable[Key, MediaInfo]
RECORDS: Table = LruTable(_budget, RECORD_COST_BYTES)
"""Of images."""
table_sizes.of_server("images", RECORDS.size)


def find(key: Key, table: Table = RECORDS, read: Callable[[bytes], MediaInfo | None] | None = None) -> MediaInfo | None:
    """What is known about these bytes, here or where records are kept. Waits for a disk and a network, if at all.

    read: makes a record of what was kept; `unpacked`, if it is not given.
    """
    record = table.get(key)
    if record is not None:
        record.renew()
        return record
    name = _name(key)
    record = record_store.current().read(name, read or unpacked)
    if record is None:
        return None
    record.name = name
    return table.admit(key, record)


def correct(key: Key, record: MediaInfo, table: Table = RECORDS) -> None:
    """Keep what a decode has said in the place of a record that said something else."""
    record.name = _name(key)
    table.replace(key, record)
    record.keep()


def admit(key: Key, record: MediaInfo, table: Table = RECORDS) -> MediaInfo:
    """Keep what a decode has said, unless it is known already; returns what is known."""
    record.name = _name(key)
    admitted = table.admit(key, record)
    if admitted is record:
        record.keep()
    return admitted


def unpacked(packed: bytes) -> MediaInfo | None:
    """The record that was `packed`; None for anything else, whoever has put it there."""
    try:
        kept = _DECODER.decode(packed)
    except (ValueError, RecursionError):  # msgspec's own are ValueErrors
        return None
    if kept.width * kept.height > MAX_PIXELS or msgspec.json.encode(kept) != packed:  # not written as records are
        return None
    options = kept.io_config and {name: _plain(value) for name, value in kept.io_config.items()}
    known: dict[Hashable, str] = {tuple(question): mm_hash for question, mm_hash in kept.mm_hashes}
    return MediaInfo((kept.width, kept.height), kept.mode, options, _mm_hashes=known)


def _name(key: Key) -> bytes:
    return frame.key("image", key.content_id, repr(key.options))


def _is_text(question: object) -> TypeGuard[tuple[str, ...]]:
    """Whether it is a tuple of texts, as those of vLLM's hasher are."""
    return isinstance(question, tuple) and all(isinstance(part, str) for part in question)


def _plain(value: Any) -> Any:
    """A setting as vLLM has it, with tuples where JSON has lists; one that has a list is not kept."""
    return tuple(map(_plain, value)) if isinstance(value, list) else value
