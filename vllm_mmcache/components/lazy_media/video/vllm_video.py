# SPDX-License-Identifier: Apache-2.0
"""A video with its record, as vLLM sees it: a MediaWithBytes that decodes when somebody asks for its frames.

`KnownVideo` is what the loader gives, frames and metadata; `KnownFrames` is what vLLM's parser makes of it. All
that vLLM does with either goes through `media`, which decodes, but for what is known without. API server, any thread.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.multimodal.media import MediaWithBytes

from vllm_mmcache.components.lazy_media.media_info import MediaInfo
from vllm_mmcache.components.lazy_media.video.video_info import shape_of
from vllm_mmcache.components.lazy_media.vllm_source import MediaSource

Frames = npt.NDArray[np.uint8]

_FRAMES = "_mmcache_is_of_frames"


class KnownFrames(MediaWithBytes):  # type: ignore[misc]
    """The frames of a video, and its bytes; undecoded until `media` is asked for.

    frames are the frames, of the record's shape, or give them: then called at most once successfully, and what it
    raises passes. origin is what another process can open the video from; None where it may not be able to.
    Shape of media: (frames, height, width, 3), uint8.
    """

    def __init__(
        self,
        frames: Frames | Callable[[], Frames],
        content: Callable[[], bytes],
        record: MediaInfo,
        content_id: bytes,
        origin: MediaSource | None,
    ) -> None:
        self.io_config = None
        self.record = record
        self.content_id = content_id
        self.origin = origin
        self._content = content
        self._frames: Frames | None = None if callable(frames) else frames
        self._decode: Callable[[], Frames] | None = frames if callable(frames) else None
        self._decoding = threading.Lock()

    @property
    def is_decoded(self) -> bool:
        """Whether the frames are in memory."""
        return self._frames is not None

    @property
    def media(self) -> Frames:
        """The frames, (frames, height, width, 3) uint8; the first one who asks decodes, others wait.

        Raises: what decoding raises; the next one who asks tries again.
        """
        with self._decoding:
            if self._decode is not None:
                self._frames, self._decode = self._decode(), None
            assert self._frames is not None
            return self._frames

    @property
    def original_bytes(self) -> bytes:
        """The video's file; of a video that came as frames (video/jpeg), their base64 with commas."""
        return self._content()

    def __reduce__(self) -> Any:
        return MediaWithBytes, (self.media, self.original_bytes)


class KnownVideo(MediaWithBytes):  # type: ignore[misc]
    """The pair that vLLM's loader gives, frames and metadata, and the bytes."""

    def __init__(self, frames: KnownFrames, metadata: dict[str, Any]) -> None:
        self.io_config = None
        self.frames = frames
        self.metadata = metadata
        self.record, self.content_id, self.origin = frames.record, frames.content_id, frames.origin
        self.processor: str | None = None  # as of an image

    @property
    def media(self) -> tuple[Frames, dict[str, Any]]:
        """Frames and metadata, as VideoMediaIO.load_bytes pairs them (vllm/multimodal/media/video.py); decodes."""
        return self.frames.media, self.metadata

    @property
    def original_bytes(self) -> bytes:
        """The bytes of its frames; decodes none."""
        return self.frames.original_bytes

    def __reduce__(self) -> Any:
        return MediaWithBytes, (self.media, self.original_bytes)


def in_black(video: KnownVideo) -> KnownVideo:
    """A video of the same shape and metadata whose frames are black, and take neither time nor memory."""
    of = video.frames
    black = np.broadcast_to(np.uint8(0), shape_of(of.record))
    return KnownVideo(
        KnownFrames(black, lambda: of.original_bytes, of.record, of.content_id, of.origin), video.metadata
    )


def ask_undecoded(ask: Callable[[Any], str], frames: KnownFrames) -> str:
    """The mm_hash that vLLM gives a video, without its frames if they don't count: unless they are few and small.

    What comes out the same for black and for white frames was not made of frames.
    """
    if frames.is_decoded:
        return ask(frames)
    content, shape = frames.original_bytes, shape_of(frames.record)
    black, white = (ask(MediaWithBytes(np.broadcast_to(np.uint8(shade), shape), content)) for shade in (0, 255))
    return black if black == white else ask(frames)


def mark_as_of_frames(loader: Any) -> None:
    """From now on an image loader opens frames of a video."""
    setattr(loader, _FRAMES, True)


def is_of_frames(loader: Any) -> bool:
    """Whether an image loader opens frames of a video, which are no images of their own."""
    return hasattr(loader, _FRAMES)
