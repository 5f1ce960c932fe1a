# SPDX-License-Identifier: Apache-2.0
"""The lazy picture beside the decoded one: same answers, no decode for size and mode, and errors that pass."""

import copy
import pickle

import numpy as np
import pytest
from PIL import Image

from vllm_mmcache.components.lazy_media.lazy_image import LazyImage
from vllm_mmcache.exactness.pictures import ellipses

PLAIN = ellipses("picture", (80, 60))


def lazy(plain: Image.Image = PLAIN) -> LazyImage:
    return LazyImage(plain.size, plain.mode, plain.copy)


def test_size_and_mode_do_not_decode() -> None:
    picture = lazy()
    assert (picture.size, picture.width, picture.height, picture.mode) == ((80, 60), 80, 60, "RGB")
    assert picture.format is None
    assert picture.getbands() == ("R", "G", "B")
    assert not hasattr(picture, "shape")
    assert isinstance(picture, Image.Image)
    assert "80x60" in repr(picture)
    assert not picture.is_decoded


@pytest.mark.parametrize(
    "use",
    [
        lambda image: np.asarray(image).tobytes(),
        lambda image: image.tobytes(),
        lambda image: image.convert("L").tobytes(),
        lambda image: image.convert("RGB").tobytes(),
        lambda image: image.resize((20, 20)).tobytes(),
        lambda image: image.crop((5, 5, 20, 20)).tobytes(),
        lambda image: [band.tobytes() for band in image.split()],
        lambda image: image.copy().tobytes(),
        lambda image: image.getpixel((3, 4)),
        lambda image: image.getextrema(),
        lambda image: image.info,
        lambda image: image.palette,
        lambda image: image.readonly,
        lambda image: dict(image.getexif()),
        lambda image: image.transpose(Image.Transpose.ROTATE_90).tobytes(),
        lambda image: copy.deepcopy(image).tobytes(),
        lambda image: pickle.loads(pickle.dumps(image)).tobytes(),
        lambda image: type(pickle.loads(pickle.dumps(image))),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA", "L", "I;16"])
def test_same_as_decoded(use: object, mode: str) -> None:
    assert callable(use)
    plain = PLAIN.convert(mode) if mode != "I;16" else Image.new("I;16", (80, 60), 4000)
    plain.info["note"] = "kept"

    def outcome(image: Image.Image) -> object:
        try:
            return use(image)
        except ValueError as error:  # some modes can't do some things
            return str(error)

    seen, expected = outcome(lazy(plain)), outcome(plain)
    if isinstance(seen, type(plain.palette)) and seen is not None:
        seen, expected = bytes(seen.palette), bytes(expected.palette)  # type: ignore[attr-defined]
    assert seen == expected


def test_drawing_on_it_stays() -> None:
    picture = lazy()
    picture.putpixel((1, 1), (1, 2, 3))
    assert picture.getpixel((1, 1)) == (1, 2, 3)


def test_error_of_decode_passes_and_may_be_tried_again() -> None:
    attempts = []

    def decode() -> Image.Image:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("Failed to load image: no memory")
        return PLAIN.copy()

    picture = LazyImage(PLAIN.size, PLAIN.mode, decode)
    with pytest.raises(ValueError, match="no memory"):
        picture.load()
    assert picture.tobytes() == PLAIN.tobytes()
    picture.load()
    assert len(attempts) == 2


def test_closed() -> None:
    picture = lazy()
    picture.close()
    with pytest.raises(ValueError, match="closed"):
        picture.tobytes()
