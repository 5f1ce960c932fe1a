# SPDX-License-Identifier: Apache-2.0
"""What is opened again from its origin, in a process that has no component, is what stock opens: every kind of file."""

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image, ImageFile

from tests.support import files
from tests.unit.components.lazy_media.test_hooks import OPTIONS, component, image_io, look
from tests.unit.components.lazy_media.video.test_hooks import video_io
from vllm_mmcache.components.lazy_media.vllm_source import MediaSource, load, source_of

GOOD = files.good()


def carried(origin: MediaSource) -> MediaSource:
    """As it is after the way into another process: JSON, and bytes."""
    content = origin.content()
    return replace(origin, options=json.loads(json.dumps(origin.options)), content=lambda: content)


def origins(loader: Any, content: bytes) -> list[MediaSource]:
    """Of an image that was unknown, is known by its bytes, and by its text."""
    text = base64.b64encode(content).decode()
    opened = [loader.load_bytes(content), loader.load_bytes(content), loader.load_base64("image/png", text)]
    return [carried(media.origin) for media in opened]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", GOOD)
def test_images_are_opened_again(name: str, options: str) -> None:
    stock = look(lambda: image_io(OPTIONS[options]).load_bytes(GOOD[name]))
    with component():
        found = origins(image_io(OPTIONS[options]), GOOD[name])
    for origin in found:
        assert look(lambda origin=origin: load(origin)) == stock  # type: ignore[misc]


def test_other_options_open_another_image() -> None:
    """Negative control."""
    white, black = (source_of(image_io(OPTIONS[name]), lambda: GOOD["png rgba"]) for name in ("RGB", "on black"))
    assert white is not None
    assert black is not None
    assert look(lambda: load(white)) != look(lambda: load(black))


def test_errors_are_stocks() -> None:
    for content in files.bad().values():
        origin = source_of(image_io({}), lambda content=content: content)  # type: ignore[misc]
        assert origin is not None
        assert look(lambda origin=origin: load(origin)) == look(  # type: ignore[misc]
            lambda content=content: image_io({}).load_bytes(content)  # type: ignore[misc]
        )


def test_somebody_elses_loader_has_no_origin() -> None:
    loader = type("Theirs", (type(image_io({})),), {})()
    assert source_of(loader, bytes) is None


SWITCHES: dict[str, tuple[Any, str, Any, bytes]] = {
    "LOAD_TRUNCATED_IMAGES": (ImageFile, "LOAD_TRUNCATED_IMAGES", True, GOOD["jpeg"][:-400]),
    "MAX_IMAGE_PIXELS": (Image, "MAX_IMAGE_PIXELS", None, GOOD["jpeg"]),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_needs_pillows_switches_has_no_origin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of this process, and not of the engine's; the control is Pillow as it is."""
    module, switch, value, content = SWITCHES[name]
    with component():
        assert image_io({}).load_bytes(GOOD["png"]).origin is not None
        assert source_of(video_io({}), bytes) is not None
        monkeypatch.setattr(module, switch, value)
        for _ in range(2):  # unknown, and known
            assert image_io({}).load_bytes(content).origin is None
        assert source_of(video_io({}), bytes) is None
