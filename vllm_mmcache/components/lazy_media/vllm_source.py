# SPDX-License-Identifier: Apache-2.0
"""What an image or a video was opened from, so that another process can open it again and get the same, bit for bit.

The API server's loaders leave it on what they open. Any process; the engine and the worker open with vLLM's own code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from PIL import Image, ImageFile
from vllm.multimodal.media import MediaIO, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

FRAMES = "video/jpeg"  # the media type of a video that comes as frames

_PILLOWS_LIMIT = 1024**3 // 4 // 3  # Image.MAX_IMAGE_PIXELS, unless somebody has set it


@dataclass(frozen=True)
class MediaSource:
    """The encoded bytes, and all that vLLM's loader was told. Only `content` can't be made JSON of.

    options of an image are ImageMediaIO's keywords; of a video {"image": ImageMediaIO's, "video": VideoMediaIO's}.
    content gives the bytes, and does so again; is_text: they are the text of a `video/jpeg` (base64 with commas).
    """

    kind: Literal["image", "video"]
    options: dict[str, Any]
    content: Callable[[], bytes] = field(repr=False)
    is_text: bool = False


def load(origin: MediaSource) -> MediaWithBytes[Any]:
    """What the API server's vLLM opened. Raises: what vLLM's loader raises."""
    opened: MediaWithBytes[Any]
    if origin.kind == "image":
        return ImageMediaIO(**origin.options).load_bytes(origin.content())
    loader = VideoMediaIO(ImageMediaIO(**origin.options["image"]), **origin.options["video"])
    if origin.is_text:
        opened = loader.load_base64(FRAMES, origin.content().decode())
    else:
        opened = loader.load_bytes(origin.content())
    return opened


def source_of(loader: MediaIO[Any], content: Callable[[], bytes], is_text: bool = False) -> MediaSource | None:
    """The origin of what `loader` opens from `content`; None for what another process may open in another way.

    That is the case of a loader that it may not have, and where somebody has set Pillow's switches in this process.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES or Image.MAX_IMAGE_PIXELS != _PILLOWS_LIMIT:
        return None
    if type(loader) is ImageMediaIO:
        return MediaSource("image", _image_options(loader), content)
    if type(loader) is VideoMediaIO and type(loader.image_io) is ImageMediaIO:
        backend = _backend(loader)
        if backend is not None:
            video = {"num_frames": loader.num_frames, **loader.kwargs, "video_backend": backend}
            return MediaSource("video", {"image": _image_options(loader.image_io), "video": video}, content, is_text)
    return None


def _image_options(loader: ImageMediaIO) -> dict[str, Any]:
    """All that ImageMediaIO itself reads of its arguments."""
    return {"image_mode": loader.image_mode, "rgba_background_color": list(loader.rgba_background_color)}


def _backend(loader: VideoMediaIO) -> str | None:
    """The name that vLLM's registry has for the loader's way of sampling frames."""
    known = VIDEO_LOADER_REGISTRY.name2class.items()
    return next((name for name, loads in known if loads is type(loader.video_loader)), None)
