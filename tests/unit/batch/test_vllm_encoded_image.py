# SPDX-License-Identifier: Apache-2.0
"""An image that travels as its file is for vLLM, without the plugin, what its own loader makes of the file."""

import copy
import os
import pickle
import traceback
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser

from vllm_mmcache.batch import EncodedImage, question
from vllm_mmcache.batch.vllm_encoded_image import encoded_in, tenant_of, with_opened

pytestmark = pytest.mark.answers


def png(mode: str = "RGB", color: Any = (1, 2, 3)) -> bytes:
    file = BytesIO()
    Image.new(mode, (20, 10), color).save(file, "PNG")
    return file.getvalue()


def mm_hash(image: Any) -> str:
    return str(MultiModalHasher.hash_kwargs("blake3", model_id="zoo", image=image))


@pytest.mark.parametrize("content", [png(), png("RGBA", (9, 9, 9, 100)), png("L", 7)], ids=["RGB", "RGBA", "L"])
@pytest.mark.parametrize(
    "options", [{}, {"image_mode": None}, {"rgba_background_color": (0, 0, 0)}, {"rgba_background_color": [0, 0, 9]}]
)
def test_it_is_what_the_loader_makes(content: bytes, options: dict[str, Any]) -> None:
    ours, stock = EncodedImage(content, **options), ImageMediaIO(**options).load_bytes(content)
    assert mm_hash(ours) == mm_hash(stock)
    assert (ours.io_config, ours.original_bytes) == (stock.io_config, stock.original_bytes)
    items = MultiModalDataParser().parse_mm_data({"image": [ours]})["image"]
    assert np.array_equal(np.asarray(items.get(0)), np.asarray(stock.media))
    assert (ours.size, ours.mode) == (stock.media.size, stock.media.mode)


def test_nothing_is_read_before_it_is_used(tmp_path: Path) -> None:
    """Not to make it, to copy it, to send it, or by what Arrow and NumPy ask an object for."""
    image = EncodedImage(tmp_path / "later.png")
    again = copy.deepcopy(pickle.loads(pickle.dumps(image)))
    assert not hasattr(again, "__arrow_array__")
    assert image != again
    assert {image: 1}[image] == 1
    assert "later.png" in repr(again)
    with pytest.raises(VLLMValidationError, match=r"later\.png"):
        again.media  # noqa: B018 -- a property that reads
    (tmp_path / "later.png").write_bytes(png())
    assert again.size == (20, 10)


def test_it_travels_as_its_file() -> None:
    content = png()
    image = EncodedImage(content, image_mode="L")
    assert image.size == (20, 10)  # pixels stay behind
    image.tenant = "a"
    sent = pickle.dumps(image)
    assert len(sent) < len(content) + 250
    again = pickle.loads(sent)
    assert again.tenant == "a"
    again.tenant = None
    assert (again.original_bytes, again.mode) == (content, "L")


def test_pixels_of_many_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [EncodedImage(png(color=(number, 0, 0))) for number in range(100)]
    opened = 0

    def open_image(self: EncodedImage) -> Any:
        nonlocal opened
        opened += 1
        return stock(self)

    stock = EncodedImage.open
    monkeypatch.setattr(EncodedImage, "open", open_image)
    for image in images:
        assert [image.size, image.size] == [(20, 10), (20, 10)]
    assert opened == len(images)
    assert sum(image._opened() is not None for image in images if image._opened) == 32


def test_a_file_that_has_changed_is_another_picture(tmp_path: Path) -> None:
    """Also to an object that was asked before; what has its name has its pixels, so that is seen with the next name."""
    path = tmp_path / "a.png"
    path.write_bytes(png(color=(1, 2, 3)))
    image = EncodedImage(path)
    assert image.media is image.media  # the control
    path.write_bytes(png(color=(200, 9, 9)))
    os.utime(path, ns=(1, 1))
    assert image.media.getpixel((0, 0)) == (200, 9, 9)
    assert image.original_bytes == path.read_bytes()
    name = mm_hash(image)
    path.write_bytes(png(color=(1, 2, 3)))
    os.utime(path, ns=(2, 2))
    assert image.media.getpixel((0, 0)) == (200, 9, 9)
    assert mm_hash(image) == mm_hash(EncodedImage(path)) != name
    assert image.media.getpixel((0, 0)) == (1, 2, 3)
    path.unlink()
    with pytest.raises(VLLMValidationError, match=r"a\.png"):
        mm_hash(image)


def test_a_file_that_has_become_one_with_alpha_is_named_with_its_background(tmp_path: Path) -> None:
    """In the order in which vLLM's hasher asks for what it hashes."""
    path = tmp_path / "a.png"
    path.write_bytes(png())
    image = EncodedImage(path)
    mm_hash(image)
    content = png("RGBA", (9, 9, 9, 100))
    path.write_bytes(content)
    assert mm_hash(image) == mm_hash(ImageMediaIO().load_bytes(content))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(png()[:40])
    with pytest.raises(VLLMValidationError, match=r"broken\.png.*can't be opened: ValueError: Failed to load image"):
        EncodedImage(tmp_path / "broken.png").open()


def test_a_wrong_color_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="rgba_background_color"):
        EncodedImage(b"", rgba_background_color=(1, 2))


def test_an_error_shows_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's HTTP names the whole URL; a traceback would, too."""
    url = "https://bucket/a.png?X-Amz-Signature=secret"

    def fail(*_: object) -> None:
        raise FileNotFoundError(url)

    monkeypatch.setattr("fsspec.open", fail)
    with pytest.raises(VLLMValidationError, match="can't be opened: FileNotFoundError") as raised:
        EncodedImage(url).open()
    assert "secret" not in "".join(traceback.format_exception(raised.value))


def test_a_tenant_needs_identity() -> None:
    with pytest.raises(VLLMValidationError, match="nothing keeps tenants apart"):
        EncodedImage(png(), tenant="a").open()


def test_a_row() -> None:
    row = question([png(), EncodedImage("b.png", tenant="b")], "Which one?", tenant="a")
    assert [part["type"] for part in row["messages"][0]["content"]] == ["image", "image", "text"]
    assert [image.tenant for image in row["multimodal_data"]["image"]] == ["a", "b"]
    with pytest.raises(ValueError, match="different tenants"):
        tenant_of(row["multimodal_data"])


def test_what_is_opened_of_a_prompt() -> None:
    """In its place, among images that came as pixels; a single image is no list."""
    files, pixels = [EncodedImage(png()), EncodedImage(png())], Image.new("RGB", (4, 4))
    mm_data = {"image": [files[0], pixels, files[1]], "audio": ["a"]}
    assert encoded_in(mm_data) == files
    opened = [one.open() for one in files]
    assert with_opened(mm_data, opened) == {"image": [opened[0], pixels, opened[1]], "audio": ["a"]}
    assert encoded_in({"image": files[0]}) == files[:1]
    assert encoded_in({"image": None}) == encoded_in({}) == encoded_in({"image": np.zeros((2, 2))}) == []
    assert tenant_of({"image": pixels}) is None
