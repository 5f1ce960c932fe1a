# SPDX-License-Identifier: Apache-2.0
"""What the process knows about a video that it has decoded once: shape of the frames, metadata, mm_hashes. No frames.

It is a record as an image has one, in a table of its own. It is of the encoded bytes and of everything that chooses
frames: how many, which decoder, all arguments. Metadata is kept as text, so that each request gets its own, as from
the decoder. API server process, any thread.
"""

import json
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_mmcache.base import settings
from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.components.lazy_media import media_info
from vllm_mmcache.components.lazy_media.media_info import Key, MediaInfo
from vllm_mmcache.metrics import table_sizes

MAX_VALUES = 1 << 36  # of all frames of a video that is kept, one for each pixel
MAX_METADATA_BYTES = 16384  # of text; it names each frame that was taken, so this is some 3,000 of them
RECORD_COST_BYTES = media_info.RECORD_COST_BYTES + MAX_METADATA_BYTES  # test_lru.py measures it

_Number = Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | Annotated[float, Meta(ge=-1e9, le=1e9)]
_Plain = bool | _Number | Annotated[str, Meta(max_length=256)] | None
_Metadata = Annotated[
    dict[media_info.Name, _Plain | Annotated[list[_Plain], Meta(max_length=8192)]],
    Meta(max_length=64),
]


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shape: Annotated[tuple[media_info.Side, ...], Meta(min_length=3, max_length=4)]
    metadata: Annotated[str, Meta(max_length=MAX_METADATA_BYTES)]


def record_of(shape: tuple[int, ...], metadata: dict[str, Any]) -> MediaInfo | None:
    """The record of a decoded video; None where its metadata is more than a record can say.

    shape: (frames, height, width, ...) of what was decoded, all of it uint8.
    """
    text = as_text(metadata)
    if text is None or len(text) > MAX_METADATA_BYTES or len(shape) < 3:
        return None
    return MediaInfo((shape[2], shape[1]), "video", {"shape": shape, "metadata": text})


def unpacked(packed: bytes) -> MediaInfo | None:
    """The record of a video that was `packed`; None for anything else, whoever has put it there."""
    record = media_info.unpacked(packed)
    if record is None or record.mode != "video" or record.io_config is None:
        return None
    try:
        kept = msgspec.convert(record.io_config, _Kept)
        msgspec.json.decode(kept.metadata, type=_Metadata)
        json.loads(kept.metadata)  # as `metadata_of` reads it
    except (ValueError, RecursionError):
        return None
    frames, height, width = kept.shape[:3]
    fits = (width, height) == record.size and frames * height * width <= MAX_VALUES
    return record if fits else None


def shape_of(record: MediaInfo) -> tuple[int, ...]:
    """Shape of the decoded frames: (frames, height, width, ...), all of it uint8."""
    assert record.io_config is not None
    shape: tuple[int, ...] = record.io_config["shape"]
    return shape


def num_bytes_of(record: MediaInfo) -> int:
    """Bytes of the decoded frames, one for each value."""
    return math.prod(shape_of(record))


def metadata_of(record: MediaInfo) -> dict[str, Any]:
    """What the decoder said of the video and of the frames that it took; a new one each time."""
    assert record.io_config is not None
    metadata: dict[str, Any] = json.loads(record.io_config["metadata"])
    return metadata


def as_text(value: Any) -> str | None:
    """JSON that gives back the very value, types and all; None where there is none."""
    return json.dumps(value) if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _budget() -> Budget:
    return Budget(settings.current().media_records, settings.current().media_records_bytes)


VIDEOS: LruTable[Key, MediaInfo] = LruTable(_budget, RECORD_COST_BYTES)
table_sizes.of_server("videos", VIDEOS.size)
