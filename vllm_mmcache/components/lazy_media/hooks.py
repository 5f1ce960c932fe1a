# SPDX-License-Identifier: Apache-2.0
"""Puts records and lazy pictures under vLLM's image loader and its hasher. API server process; vLLM's media threads.

Bytes that are known become a lazy picture; all others go to vLLM's own code, at once and in its thread pool. The
result is always a MediaWithBytes with the mm_hash that stock vLLM computes. vLLM's errors pass unchanged.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
import PIL
import vllm
import vllm.envs as envs
from PIL import Image, ImageFile, features
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from vllm_mmcache.base import status, tenant
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.components.lazy_media import media_info
from vllm_mmcache.components.lazy_media.lazy_image import LazyImage
from vllm_mmcache.components.lazy_media.media_info import Key, MediaInfo
from vllm_mmcache.components.lazy_media.video.vllm_video import KnownFrames, ask_undecoded, is_of_frames
from vllm_mmcache.components.lazy_media.vllm_source import MediaSource, source_of
from vllm_mmcache.content import media_tenant, placeholders
from vllm_mmcache.content.base64_image import Base64Image
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters

FORMAT = 2
"""Of records of images, in their key: raise it when what is kept of one means something else, or is another layout."""

# Pillow's names of the libraries that it decodes with.
_CODECS = ("jpg", "libjpeg_turbo", "jpg_2000", "zlib", "zlib_ng", "libtiff", "webp", "avif")


hook = Hooks(
    "lazy_media",
    "api",
    upstream="57752 (lazy media, an experiment)",
    remove_when="vLLM keeps known images undecoded",
)


class RecordWrong(ValueError):
    """What was kept of an image or a video is not of these bytes: somebody else has written it."""


class KnownImage(MediaWithBytes):
    """vLLM's pair of an image and its bytes, with the image's record; the bytes may be base64 still.

    origin is what another process can open the same image from; None where it may not be able to.
    """

    def __init__(
        self,
        media: Image.Image,
        content: Callable[[], bytes],
        record: MediaInfo,
        content_id: bytes,
        origin: MediaSource | None,
    ) -> None:
        self.media = media
        self.io_config = record.io_config
        self.record = record
        self.content_id = content_id
        self.origin = origin
        self.is_extracted = False
        self.processor: str | None = None
        """What lazy_processing did in this request: run or deferred; None where it had nothing to do."""
        self._content = content

    @property
    def original_bytes(self) -> bytes:
        """The image's file; base64 is decoded now, if it was not. Decodes no pixels."""
        return self._content()

    def __reduce__(self) -> Any:
        return MediaWithBytes, (self.media, self.original_bytes, self.io_config)


@hook(
    "vllm.multimodal.media.image:ImageMediaIO.load_base64",
    name="text",
    args=("data",),
    why="every image of a conversation is decoded from base64 and hashed on every turn",
)
def load_base64(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ImageMediaIO.load_base64(media_type, data): a known text is neither decoded nor hashed as bytes."""
    if not _is_served(instance):
        return wrapped(*args, **kwargs)
    text = argument(wrapped, args, kwargs, "data")
    extracted = placeholders.resolve(text)
    payload = extracted or read_text(text, media_tenant.key_of(instance))
    if payload is None:
        return wrapped(*args, **kwargs)
    stock = _stock_load_bytes(instance)
    if stock is None:
        opened = instance.load_bytes(payload.decode())
    else:
        with counters.MEDIA_SECONDS.seconds():
            opened = _open(stock, payload.decode, instance, payload.content_id)
    if isinstance(opened, KnownImage):
        opened.is_extracted = extracted is not None
    return opened


@hook(
    "vllm.multimodal.media.image:ImageMediaIO.load_bytes",
    name="content",
    args=("data",),
    reads=("vllm.multimodal.media:MediaWithBytes",),
    why="every image of a conversation is decoded on every turn, also when all its tokens are cached",
)
def load_bytes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ImageMediaIO.load_bytes(data): known bytes become a lazy picture, others are decoded by vLLM's own."""
    if not _is_served(instance):
        return wrapped(*args, **kwargs)
    content = argument(wrapped, args, kwargs, "data")
    with counters.MEDIA_SECONDS.seconds():
        # What decodes late is vLLM's own, also under a loader that makes something else of its result.
        return _open(wrapped, lambda: content, instance, tenant.digest(content, media_tenant.key_of(instance)))


@hook(
    "vllm.multimodal.hasher:MultiModalHasher.hash_kwargs",
    name="mm_hash",
    args=("algorithm",),
    why="the hash of known bytes is computed anew for every image on every turn",
    upstream="none yet",
    remove_when="vLLM remembers the hash of known bytes",
)
def remember_mm_hash(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of MultiModalHasher.hash_kwargs(algorithm, /, **kwargs): hashes known bytes once.

    The question is the same call with an empty string in the place of the image, or of the video's frames; its answer
    is kept in the record.
    """
    recorded = [(name, found) for name, value in kwargs.items() if (found := _recorded(value)) is not None]
    if len(recorded) != 1:
        return wrapped(*args, **kwargs)
    ((name, (item, with_item)),) = recorded

    def ask(stand_in: Any) -> str:
        return str(wrapped(*args, **{**kwargs, name: with_item(stand_in)}))

    question = (*args, name, ask(""))
    known = item.record.mm_hash(question)
    if known is None:
        known = ask_undecoded(ask, item) if isinstance(item, KnownFrames) else ask(item)
        item.record.keep_mm_hash(question, known)
    return known


def _recorded(value: Any) -> tuple[KnownImage | KnownFrames, Callable[[Any], Any]] | None:
    """The image or the frames in an argument of the hasher, and what puts something else there; None for no such."""
    if isinstance(value, KnownImage | KnownFrames):
        return value, lambda stand_in: stand_in
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], KnownFrames):
        return value[0], lambda stand_in: (stand_in, value[1])  # with the video's metadata
    return None


def is_at_hand(url: str, loader: Any) -> bool:
    """Whether a data URL is of an image that was taken out of its body and is known here: opening it waits for nothing.

    loader: whatever is to open it. Event loop.
    """
    extracted = placeholders.resolve(url[-placeholders.MAX_NAME_CHARS :].rpartition(",")[2])
    if extracted is None or type(loader) is not ImageMediaIO or not _is_served(loader):
        return False
    record = media_info.RECORDS.get(_key(extracted.content_id, loader))
    return record is not None and _is_lazy(record)


def _is_served(loader: Any) -> bool:
    """Whether its images are to be known: not those that are frames of a video."""
    return status.is_on("lazy_media") and not is_of_frames(loader)


def read_text(text: str, tenant_key: bytes | None) -> Base64Image | None:
    """The payload of base64 text; None where it is none."""
    try:
        return Base64Image(text.encode("ascii"), tenant_key)
    except ValueError:
        return None  # stock says what is wrong with it


def _key(content_id: bytes, instance: Any) -> Key:
    """Everything that ImageMediaIO's result depends on, beside limits that are charged per request."""
    limits = envs.VLLM_MAX_IMAGE_PIXELS, Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    options = instance.image_mode, instance.rgba_background_color
    kind = type(instance).__module__, type(instance).__qualname__
    # Without it, an mm_hash may be made of an ImageID in the EXIF, which whoever made the file has chosen.
    is_by_content = status.is_on("identity")
    return Key(content_id, (FORMAT, is_by_content, _facts(), *kind, *options, *limits))


@cache
def _facts() -> str:
    """What decodes here, since a record is read by other processes, too."""
    codecs = [(name, features.version(name)) for name in _CODECS]
    versions = [(module.__name__, module.__version__) for module in (vllm, PIL, numpy)]
    return repr((versions, codecs))


def _open(stock: Callable[[bytes], Any], content: Callable[[], bytes], instance: Any, content_id: bytes) -> Any:
    key = _key(content_id, instance)
    record = media_info.find(key)
    if record is not None and _is_lazy(record):
        return _open_lazily(key, record, stock, content, instance, content_id)
    decoded_from = content()
    opened = stock(decoded_from)
    counters.IMAGES_DECODED.add()
    if type(opened.media) is not Image.Image:  # still bound to its file, so more than size, mode and pixels
        return opened
    record = media_info.admit(key, MediaInfo(opened.media.size, opened.media.mode, opened.io_config))
    origin = source_of(instance, lambda: decoded_from)
    return KnownImage(opened.media, lambda: decoded_from, record, content_id, origin)


def _is_lazy(record: MediaInfo) -> bool:
    """Whether an image with this record is left undecoded."""
    return record.mode != "video" and _is_allowed(record.size)


def _is_allowed(size: tuple[int, int]) -> bool:
    """Whether vLLM opens images of that size; one that it doesn't has no record but one that somebody has made up."""
    most = int(envs.VLLM_MAX_IMAGE_PIXELS)
    return most <= 0 or size[0] * size[1] <= most


def _open_lazily(
    key: Key,
    record: MediaInfo,
    stock: Callable[[bytes], Any],
    content: Callable[[], bytes],
    instance: Any,
    content_id: bytes,
) -> KnownImage:
    budget = getattr(instance, "decoded_budget", None)  # vLLM 0.33: decoded bytes that one request may ask for
    if budget is not None:
        budget.charge(record.size[0] * record.size[1] * 4)
    counters.IMAGES_AVOIDED.add()

    def decode() -> Image.Image:
        counters.IMAGES_DECODED.add()
        counters.IMAGES_DECODED_LATE.add()
        opened = stock(content())
        image: Image.Image = opened.media
        if (image.size, image.mode) != (record.size, record.mode):
            media_info.correct(key, MediaInfo(image.size, image.mode, opened.io_config))
            raise RecordWrong(f"an image of {image.size} had a record of {record.size}; it is right now: ask again")
        return image

    picture = LazyImage(record.size, record.mode, decode)
    return KnownImage(picture, content, record, content_id, source_of(instance, content))


def _stock_load_bytes(instance: Any) -> Callable[[bytes], Any] | None:
    """The load_bytes of vLLM below our wrapper; None for a loader that overrides it, and meets our wrapper later."""
    return getattr(instance.load_bytes, "__wrapped__", None)
