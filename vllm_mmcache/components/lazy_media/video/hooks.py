# SPDX-License-Identifier: Apache-2.0
"""Puts records under vLLM's video loader, and hands undecoded videos through its parser. API server, media threads.

Bytes that are known, with all that chooses frames of them, become a recorded video; all others go to vLLM's own code.
The result has the mm_hash that stock vLLM computes. vLLM's errors pass unchanged.
"""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import vllm.envs as envs
from vllm.multimodal.parse import VideoProcessorItems

from vllm_mmcache.base import status, tenant
from vllm_mmcache.base.arguments import argument, named
from vllm_mmcache.base.versions import installed, vllm_version
from vllm_mmcache.components.lazy_media.hooks import RecordWrong, read_text
from vllm_mmcache.components.lazy_media.media_info import Key, MediaInfo, admit, correct, find
from vllm_mmcache.components.lazy_media.video import DECODERS
from vllm_mmcache.components.lazy_media.video.video_info import (
    VIDEOS,
    as_text,
    metadata_of,
    num_bytes_of,
    record_of,
    shape_of,
    unpacked,
)
from vllm_mmcache.components.lazy_media.video.vllm_video import Frames, KnownFrames, KnownVideo, mark_as_of_frames
from vllm_mmcache.components.lazy_media.vllm_source import FRAMES, source_of
from vllm_mmcache.content import media_tenant, placeholders
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters

FORMAT = 2
"""Of records of videos, in their key: raise it when what is kept of one means something else, or is another layout."""

Load = Callable[[Any], Any]
"""Stock's way to open the bytes, given a loader."""


hook = Hooks(
    "lazy_media",
    "api",
    why="every video of a conversation is decoded on every turn, also when all its tokens are cached",
    upstream="57752 (lazy media, an experiment)",
    remove_when="vLLM keeps known videos undecoded",
)


@hook(
    "vllm.multimodal.media.video:VideoMediaIO.load_base64",
    name="video_text",
    args=("media_type", "data"),
)
def load_base64(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of VideoMediaIO.load_base64(media_type, data): a video file as text, or its frames as JPEG files."""
    media_type = argument(wrapped, args, kwargs, "media_type")
    text = argument(wrapped, args, kwargs, "data")
    if not status.is_on("lazy_media"):
        return wrapped(*args, **kwargs)
    if media_type.lower() == FRAMES:
        content = text.encode(errors="surrogatepass")  # stock says what is wrong with it
        content_id = tenant.digest(content, _tenant_key(instance))
        return _open(
            instance, content_id, lambda: content, lambda loader: wrapped.__func__(loader, media_type, text), True
        )
    payload = placeholders.resolve(text) or read_text(text, _tenant_key(instance))
    if payload is None:
        return wrapped(*args, **kwargs)
    below = _below(instance.load_bytes)
    return _open(instance, payload.content_id, payload.decode, lambda loader: below(loader, payload.decode()))


@hook(
    "vllm.multimodal.media.video:VideoMediaIO.load_bytes",
    name="video_content",
    args=("data",),
)
def load_bytes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of VideoMediaIO.load_bytes(data): known bytes stay undecoded, others are decoded by vLLM's own."""
    if not status.is_on("lazy_media"):
        return wrapped(*args, **kwargs)
    content = argument(wrapped, args, kwargs, "data")
    content_id = tenant.digest(content, _tenant_key(instance))
    return _open(instance, content_id, lambda: content, lambda loader: wrapped.__func__(loader, content))


@hook(
    "vllm.multimodal.parse:MultiModalDataParser._get_video_with_metadata",
    name="video_parts",
    args=("video",),
    why="it takes frames and metadata apart, for which an undecoded video would be decoded",
    upstream="none yet",
)
def keep_undecoded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of MultiModalDataParser._get_video_with_metadata(video): takes ours apart without decoding.

    vLLM's own takes frames and metadata of the pair `media`, which for ours would decode.
    """
    video = argument(wrapped, args, kwargs, "video")
    return (video.frames, video.metadata) if isinstance(video, KnownVideo) else wrapped(*args, **kwargs)


@hook(
    "vllm.renderers.base:BaseRenderer._validate_mm_uuids",
    name="video_names",
    args=("mm_data", "mm_data_items", "mm_uuid_items"),
    why="it looks at each item to see whether it is None, for which an undecoded video would be decoded",
    upstream="none yet",
)
def check_without_decoding(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._validate_mm_uuids(mm_data, mm_data_items, mm_uuid_items): it asks which items are None.

    To look at a video as vLLM's items show it would be to decode it; so it is given what they are made of.
    """
    given = named(wrapped, args, kwargs)
    items = given["mm_data_items"]
    if isinstance(videos := items.get("video"), VideoProcessorItems):
        given["mm_data_items"] = {**items, "video": videos.data}
    return wrapped(**given)


def _open(instance: Any, content_id: bytes, content: Callable[[], bytes], load: Load, is_text: bool = False) -> Any:
    """A recorded video; vLLM's own of one that no record can be kept of."""
    with counters.MEDIA_SECONDS.seconds():
        key = _key(content_id, instance, is_text)
        record = find(key, VIDEOS, unpacked) if key is not None else None
        if key is None or record is None:
            opened = load(_for_frames(instance))
            counters.VIDEOS_DECODED.add()
            frames, about = opened.media
            if key is None or type(frames) is not np.ndarray or frames.dtype != np.uint8:
                return opened
            record = record_of(frames.shape, about)
            if record is None:
                return opened
            record = admit(key, record, VIDEOS)
        else:
            _charge(instance, record, is_text)
            counters.VIDEOS_AVOIDED.add()
            about, frames = metadata_of(record), partial(_decode_late, instance, load, key, record)
        origin = source_of(instance, content, is_text)
        return KnownVideo(KnownFrames(frames, content, record, content_id, origin), about)


def _decode_late(instance: Any, load: Load, key: Key, record: MediaInfo) -> Frames:
    counters.VIDEOS_DECODED.add()
    counters.VIDEOS_DECODED_LATE.add()
    loader = _for_frames(instance)
    loader.image_io.decoded_budget = None  # charged when it was opened
    frames: Frames
    frames, about = load(loader).media
    if frames.shape != shape_of(record):
        if (right := record_of(frames.shape, about)) is not None:
            correct(key, right, VIDEOS)
        raise RecordWrong(f"a video of {frames.shape} had a record of {shape_of(record)}; it is right now: ask again")
    return frames


def _key(content_id: bytes, instance: Any, is_text: bool) -> Key | None:
    """Everything that VideoMediaIO's result depends on, beside limits that are charged per request."""
    arguments, images = as_text({"num_frames": instance.num_frames, **instance.kwargs}), instance.image_io
    if arguments is None:
        return None
    loaders = instance, instance.video_loader, images
    kinds = tuple(f"{type(loader).__module__}.{type(loader).__qualname__}" for loader in loaders)
    of_images = images.image_mode, images.rgba_background_color, envs.VLLM_MAX_IMAGE_PIXELS
    # A client's arguments may be long, the key must not be.
    of_request = is_text, tenant.digest(arguments.encode(), None)
    return Key(content_id, (FORMAT, status.is_on("identity"), *kinds, *of_request, *of_images, _made_by()))


@cache
def _made_by() -> str:
    """Versions of what decodes videos."""
    found = {"vllm": vllm_version()} | {name: installed(name) for name in (*DECODERS, "pillow", "numpy")}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _charge(instance: Any, record: MediaInfo, is_text: bool) -> None:
    budget = getattr(instance.image_io, "decoded_budget", None)  # vLLM 0.33: as in its load_bytes, and for images
    if budget is not None:
        num_frames, height, width = shape_of(record)[:3]
        budget.charge(num_frames * height * width * 4 if is_text else num_bytes_of(record))


def _for_frames(instance: Any) -> Any:
    """A loader like this one; the images that it opens are frames and no images of their own."""
    loader = copy.copy(instance)
    loader.image_io = copy.copy(instance.image_io)
    mark_as_of_frames(loader.image_io)
    return loader


def _tenant_key(instance: Any) -> bytes | None:
    return media_tenant.key_of(instance.image_io)


def _below(bound: Any) -> Callable[..., Any]:
    """The function of vLLM's below our wrapper."""
    function: Callable[..., Any] = getattr(bound, "__wrapped__", bound).__func__
    return function
