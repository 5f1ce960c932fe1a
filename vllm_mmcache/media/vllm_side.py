# SPDX-License-Identifier: Apache-2.0
"""Puts records and lazy pictures under vLLM's image loader and its hasher. API server process; vLLM's media threads.

Bytes that are known become a lazy picture; all others go to vLLM's own code, at once and in its thread pool. The
result is always a MediaWithBytes with the mm_hash that stock vLLM computes. vLLM's errors pass unchanged.
"""

from collections.abc import Callable
from typing import Any

import vllm.envs as envs
from PIL import Image
from vllm.multimodal.media import MediaWithBytes

from vllm_mmcache import events, rooms, tenant
from vllm_mmcache.body import references
from vllm_mmcache.body.payload import Payload, content_id_of
from vllm_mmcache.media.picture import LazyPicture
from vllm_mmcache.media.records import RECORDS, Key, Record


class RecordedMedia(MediaWithBytes):
    """vLLM's pair of an image and its bytes, with the image's record; the bytes may be base64 still."""

    def __init__(self, media: Image.Image, content: Callable[[], bytes], record: Record, content_id: bytes) -> None:
        self.media = media
        self.io_config = record.io_config
        self.record = record
        self.content_id = content_id
        self.is_lifted = False
        self._content = content

    @property
    def original_bytes(self) -> bytes:
        return self._content()

    def __reduce__(self) -> Any:
        return MediaWithBytes, (self.media, self.original_bytes, self.io_config)


def remember_tenant(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ImageMediaIO.__init__: made in the request's task, used in a media thread that knows no request."""
    outcome = wrapped(*args, **kwargs)
    instance._mmcache_tenant_key = tenant.key_of(tenant.SALT.get())
    return outcome


def load_base64(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ImageMediaIO.load_base64(media_type, data): a known text is neither decoded nor hashed as bytes."""
    if not rooms.is_on("lazy_media"):
        return wrapped(*args, **kwargs)
    text = kwargs["data"] if "data" in kwargs else args[1]
    lifted = references.resolve(text)
    payload = lifted or _read(text, _tenant_key(instance))
    if payload is None:
        return wrapped(*args, **kwargs)
    with events.MEDIA_SECONDS.seconds():
        record = RECORDS.get(_key(payload.content_id, instance))
        if record is not None:
            opened = _open_lazily(record, payload.decode, instance, payload.content_id)
            opened.is_lifted = lifted is not None
            return opened
    opened = instance.load_bytes(payload.decode())
    if isinstance(opened, RecordedMedia):
        opened.is_lifted = lifted is not None
    return opened


def load_bytes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ImageMediaIO.load_bytes(data)."""
    if not rooms.is_on("lazy_media"):
        return wrapped(*args, **kwargs)
    content = kwargs["data"] if "data" in kwargs else args[0]
    with events.MEDIA_SECONDS.seconds():
        key = _key(content_id_of(content, _tenant_key(instance)), instance)
        record = RECORDS.get(key)
        if record is not None:
            return _open_lazily(record, lambda: content, instance, key.content_id)
        opened = wrapped(*args, **kwargs)
        events.IMAGES_DECODED.add()
        if type(opened.media) is not Image.Image:  # still bound to its file, so more than size, mode and pixels
            return opened
        record = RECORDS.admit(key, Record(opened.media.size, opened.media.mode, opened.io_config))
        return RecordedMedia(opened.media, lambda: content, record, key.content_id)


def remember_mm_hash(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of MultiModalHasher.hash_kwargs(algorithm, /, **kwargs): hashes a known image's bytes once.

    The question is the same call with an empty string in the image's place; its answer is kept in the record.
    """
    recorded = [name for name, value in kwargs.items() if isinstance(value, RecordedMedia)]
    if len(recorded) != 1:
        return wrapped(*args, **kwargs)
    record = kwargs[recorded[0]].record
    question = (*args, recorded[0], wrapped(*args, **{**kwargs, recorded[0]: ""}))
    known = record.mm_hash(question)
    if known is None:
        known = wrapped(*args, **kwargs)
        record.keep_mm_hash(question, known)
    return known


def _tenant_key(instance: Any) -> bytes | None:
    """Whose image this is; None without a salt, and where the group identity is off."""
    key: bytes | None = getattr(instance, "_mmcache_tenant_key", None)
    return key


def _read(text: str, tenant_key: bytes | None) -> Payload | None:
    try:
        return Payload(text.encode("ascii"), tenant_key)
    except ValueError:
        return None  # stock says what is wrong with it


def _key(content_id: bytes, instance: Any) -> Key:
    """Everything that ImageMediaIO's result depends on, beside limits that are charged per request."""
    limit = envs.VLLM_MAX_IMAGE_PIXELS
    return Key(content_id, (type(instance).__name__, instance.image_mode, instance.rgba_background_color, limit))


def _open_lazily(record: Record, content: Callable[[], bytes], instance: Any, content_id: bytes) -> RecordedMedia:
    budget = getattr(instance, "decoded_budget", None)  # vLLM 0.33: decoded bytes that one request may ask for
    if budget is not None:
        budget.charge(record.size[0] * record.size[1] * 4)
    events.IMAGES_AVOIDED.add()

    def decode() -> Image.Image:
        events.IMAGES_DECODED.add()
        events.IMAGES_DECODED_LATE.add()
        image: Image.Image = stock(content()).media
        return image

    stock = _stock_load_bytes(instance)
    return RecordedMedia(LazyPicture(record.size, record.mode, decode), content, record, content_id)


def _stock_load_bytes(instance: Any) -> Callable[[bytes], Any]:
    """vLLM's own load_bytes, below our wrapper; the lazy picture's decode must not give a lazy picture."""
    bound = instance.load_bytes
    below: Callable[[bytes], Any] = getattr(bound, "__wrapped__", bound)
    return below
