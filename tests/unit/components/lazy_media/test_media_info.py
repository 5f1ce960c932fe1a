# SPDX-License-Identifier: Apache-2.0
"""What the record of an image or a video depends on beside its bytes: each thing that changes makes another key."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import PIL
import pytest
import vllm
from PIL import ExifTags, Image, ImageFile, features
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from tests.support import files
from tests.unit.components.lazy_media.test_hooks import component, image_io, mm_hash
from tests.unit.components.lazy_media.test_restarts import restart
from vllm_mmcache.base import settings, status
from vllm_mmcache.components.lazy_media import hooks as images
from vllm_mmcache.components.lazy_media.lazy_image import LazyImage
from vllm_mmcache.components.lazy_media.media_info import Key
from vllm_mmcache.components.lazy_media.video import hooks as videos
from vllm_mmcache.exactness.pictures import ellipses

Change = Callable[[pytest.MonkeyPatch], Any]


class AnotherImageMediaIO(ImageMediaIO):
    pass


def identity_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(status, "is_on", lambda component: component != "identity")


def of_image(**options: Any) -> Key:
    return images._key(b"content", ImageMediaIO(**options))


def of_video(image: Any = None, **options: Any) -> Key:
    key = videos._key(b"content", VideoMediaIO(image or ImageMediaIO(), **{"num_frames": 4, **options}), False)
    assert key is not None
    return key


OF_IMAGES: dict[str, Change] = {
    "the format": lambda patch: patch.setattr(images, "FORMAT", 99),
    "identity": identity_off,
    "another Pillow": lambda patch: patch.setattr(PIL, "__version__", "another"),
    "another numpy": lambda patch: patch.setattr(numpy, "__version__", "another"),
    "another vLLM": lambda patch: patch.setattr(vllm, "__version__", "another"),
    "another codec": lambda patch: patch.setattr(features, "version", lambda name: "another"),
    "VLLM_MAX_IMAGE_PIXELS": lambda patch: patch.setenv("VLLM_MAX_IMAGE_PIXELS", "1000"),
    "Pillow's limit": lambda patch: patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000),
    "cut files": lambda patch: patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
    "the mode": lambda patch: of_image(image_mode="L"),
    "the background": lambda patch: of_image(rgba_background_color=(0, 0, 0)),
    "another loader": lambda patch: images._key(b"content", AnotherImageMediaIO()),
    "the bytes": lambda patch: images._key(b"others", ImageMediaIO()),
}
OF_VIDEOS: dict[str, Change] = {
    "the format": lambda patch: patch.setattr(videos, "FORMAT", 99),
    "identity": identity_off,
    "another decoder": lambda patch: patch.setattr(videos, "installed", lambda name: "another"),
    "another vLLM": lambda patch: patch.setattr(videos, "vllm_version", lambda: "another"),
    "VLLM_MAX_IMAGE_PIXELS": lambda patch: patch.setenv("VLLM_MAX_IMAGE_PIXELS", "1000"),
    "how many frames": lambda patch: of_video(num_frames=5),
    "an argument": lambda patch: of_video(fps=3),
    "the frames' mode": lambda patch: of_video(ImageMediaIO(image_mode="L")),
    "the frames' background": lambda patch: of_video(ImageMediaIO(rgba_background_color=(0, 0, 0))),
    "the frames' loader": lambda patch: of_video(AnotherImageMediaIO()),
    "frames as text": lambda patch: videos._key(b"content", VideoMediaIO(ImageMediaIO(), num_frames=4), True),
}


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What changes here changes between two processes, and each looks once."""
    monkeypatch.setattr(images, "_facts", images._facts.__wrapped__)
    monkeypatch.setattr(videos, "_made_by", videos._made_by.__wrapped__)
    return monkeypatch


@pytest.mark.parametrize("name", OF_IMAGES)
def test_images(name: str, patch: pytest.MonkeyPatch) -> None:
    before = of_image()
    assert of_image() == before  # the control
    changed = OF_IMAGES[name](patch)
    assert (changed if isinstance(changed, Key) else of_image()) != before


@pytest.mark.parametrize("name", OF_VIDEOS)
def test_videos(name: str, patch: pytest.MonkeyPatch) -> None:
    before = of_video()
    assert of_video() == before  # the control
    changed = OF_VIDEOS[name](patch)
    assert (changed if isinstance(changed, Key) else of_video()) != before


@pytest.mark.slow
@pytest.mark.parametrize(("most", "is_known"), [("0", True), ("1000000", True), ("10", False)])
def test_0_is_no_limit_of_pixels(most: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To vLLM, and so to what is left undecoded. The control is a small limit."""
    monkeypatch.setattr(settings, "_current", settings.Settings(store=str(tmp_path)))
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", most)
    content = files.saved(ellipses("large"), "JPEG")
    with component():
        if not is_known:
            with pytest.raises(ValueError, match="VLLM_MAX_IMAGE_PIXELS"):
                image_io({}).load_bytes(content)
            return
        image_io({}).load_bytes(content)
        assert isinstance(image_io({}).load_bytes(content).media, LazyImage)


@pytest.mark.slow
def test_a_name_from_exif_ends_when_identity_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's ImageID is an image's name to stock, and to a server without identity; its pixels are afterwards."""
    content = files.saved(ellipses("named"), "JPEG")
    by_pixels = mm_hash(image_io({}).load_bytes(content))
    monkeypatch.setattr(settings, "_current", settings.Settings(store=str(tmp_path), identity=False))
    with component():
        opened = image_io({}).load_bytes(content)
        opened.media.getexif()[ExifTags.Base.ImageID] = uuid.UUID(int=7)
        by_exif = mm_hash(opened)
        assert by_exif != by_pixels
        restart()
        known = image_io({}).load_bytes(content)
        assert isinstance(known.media, LazyImage)
        assert mm_hash(known) == by_exif, "the control: the name is kept with the image"
        restart()
    monkeypatch.setattr(settings, "_current", settings.Settings(store=str(tmp_path)))
    with component():
        assert mm_hash(image_io({}).load_bytes(content)) == by_pixels
    restart()
