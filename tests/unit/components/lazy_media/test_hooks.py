# SPDX-License-Identifier: Apache-2.0
"""vLLM's image loader and hasher with the component installed, side by side with stock, for every kind of file."""

import base64
import contextlib
import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support import files
from vllm_mmcache.base import settings, status, tenant
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.lazy_media.lazy_image import LazyImage
from vllm_mmcache.components.lazy_media.media_info import RECORDS
from vllm_mmcache.content.base64_image import CONTENT_IDS
from vllm_mmcache.exactness.pictures import ellipses
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import COMPONENTS
from vllm_mmcache.metrics import counters
from vllm_mmcache.storage import record_store

OPTIONS: dict[str, dict[str, Any]] = {
    "RGB": {},
    "as it is": {"image_mode": None},
    "grey": {"image_mode": "L"},
    "on black": {"rgba_background_color": [0, 0, 0]},
}
ALGORITHMS = ("blake3", "sha256", "sha512")
FILES = {**files.good(), **files.bad()}


@contextlib.contextmanager
def component() -> Iterator[None]:
    """The group installed, with nothing known; stock outside of the block."""
    CONTENT_IDS.clear()
    RECORDS.clear()
    record_store.close()
    outcome = installer.install("lazy_media", COMPONENTS["lazy_media"].all_hooks(), vllm_version())
    assert outcome.state == "on", outcome.reason
    try:
        yield
    finally:
        installer.undo("lazy_media")


@pytest.fixture
def installed() -> Iterator[None]:
    with component():
        yield


def image_io(options: dict[str, Any]) -> Any:
    from vllm.multimodal.media.image import ImageMediaIO

    return ImageMediaIO(**options)


def mm_hash(media: Any, algorithm: str = "blake3", **more: Any) -> str:
    from vllm.multimodal.hasher import MultiModalHasher

    return str(MultiModalHasher.hash_kwargs(algorithm, model_id="zoo", image=media, **more))


def look(load: Callable[[], Any]) -> Any:
    """All that can be seen of what is loaded, identity first and pixels last; or the error."""
    try:
        media = load()
    except Exception as error:
        return type(error), re.sub("0x[0-9a-f]+", "0x", str(error)), type(error.__cause__)
    hashes = [mm_hash(media, algorithm) for algorithm in ALGORITHMS]
    hashes.append(mm_hash(media, mm_processor_kwargs={"max_pixels": 4096}))
    image = media.media
    seen = (hashes, image.size, image.mode, media.size, media.io_config, media.original_bytes, image.format)
    pixels = np.asarray(media)
    palette = image.palette and (image.palette.mode, bytes(image.palette.palette))
    return (*seen, pixels.shape, str(pixels.dtype), pixels.tobytes(), palette, image.info)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FILES)
def test_as_stock(name: str, options: str, tmp_path: Path) -> None:
    """Unknown, known by bytes, known by text, and from a file: always what stock gives, errors too."""
    content = FILES[name]
    text = base64.b64encode(content).decode()
    path = tmp_path / "image"
    path.write_bytes(content)
    ways: list[Callable[[Any], Any]] = [
        lambda loader: loader.load_bytes(content),
        lambda loader: loader.load_base64("image/png", text),
        lambda loader: loader.load_file(path),
    ]
    stock = look(lambda: ways[0](image_io(OPTIONS[options])))
    assert stock == look(lambda: ways[1](image_io(OPTIONS[options])))
    with component():
        for way in (*ways, *ways):
            assert look(lambda way=way: way(image_io(OPTIONS[options]))) == stock  # type: ignore[misc]
        if isinstance(stock[0], type):  # an error
            assert not len(RECORDS)


@pytest.mark.parametrize("text", ["not base64!", "AAA", "", "ÄÖÜ" * 9, "AAAA\nAAAA", "mmcache-0000-0000-0"])
def test_text_that_is_no_base64(text: str) -> None:
    stock = look(lambda: image_io({}).load_base64("image/png", text))
    with component():
        assert look(lambda: image_io({}).load_base64("image/png", text)) == stock


@pytest.mark.usefixtures("installed")
def test_known_images_are_not_decoded() -> None:
    content = FILES["png rgba"]
    text = base64.b64encode(content).decode()
    first = image_io({}).load_bytes(content)
    assert type(first.media) is Image.Image
    cold_hash = mm_hash(first)
    before = counters.IMAGES_DECODED.value
    by_text = [image_io({}).load_base64("image/png", text) for _ in range(2)]
    for known in (*by_text, image_io({}).load_bytes(content)):
        assert mm_hash(known) == cold_hash
        assert (known.size, known.mode, known.width) == (files.SIZE, "RGB", files.SIZE[0])
        assert isinstance(known.media, LazyImage)
        assert not known.media.is_decoded
    assert counters.IMAGES_DECODED.value == before
    np.asarray(known)
    assert known.media.is_decoded
    assert counters.IMAGES_DECODED.value == before + 1


@pytest.mark.usefixtures("installed")
def test_other_bytes_are_another_image() -> None:
    """Negative controls: one changed byte, and a difference after a long common beginning."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = files.saved(Image.fromarray(noise), "BMP")
    changed = content[:-1] + bytes([content[-1] ^ 1])
    assert content[: 8 * 1024] == changed[: 8 * 1024]
    loads: list[Callable[[bytes], Any]] = [
        lambda c: image_io({}).load_bytes(c),
        lambda c: image_io({}).load_base64("image/bmp", base64.b64encode(c).decode()),
    ]
    for load in loads:
        one, other = (load(c) for c in (content, changed))
        assert mm_hash(one) != mm_hash(other)
        assert np.asarray(one).tobytes() != np.asarray(other).tobytes()


@pytest.mark.usefixtures("installed")
def test_other_options_are_another_record() -> None:
    content = FILES["png rgba"]
    on_white, on_black = (image_io(options).load_bytes(content) for options in (OPTIONS["RGB"], OPTIONS["on black"]))
    assert mm_hash(on_white) != mm_hash(on_black)
    again = image_io(OPTIONS["on black"]).load_bytes(content)
    assert isinstance(again.media, LazyImage)
    assert np.asarray(again).tobytes() == np.asarray(on_black).tobytes()


@pytest.mark.usefixtures("installed")
def test_images_are_known_to_their_tenant_alone() -> None:
    """The loader is made in the request's context and used in a thread that has another one."""
    installer.install("identity", COMPONENTS["identity"].all_hooks(), vllm_version())
    content = FILES["png"]
    text = base64.b64encode(content).decode()

    def lazy(salt: str | None, load: Callable[[Any], Any]) -> bool:
        token = tenant.SALT.set(salt)
        loader = image_io({})
        tenant.SALT.reset(token)
        return isinstance(load(loader).media, LazyImage)

    try:
        for load in (lambda loader: loader.load_bytes(content), lambda loader: loader.load_base64("image/png", text)):
            RECORDS.clear()
            record_store.close()
            seen = [(salt, lazy(salt, load)) for salt in (None, "a", "b", None, "a", "b")]
            assert [known for _, known in seen] == [False] * 3 + [True] * 3
        assert len(CONTENT_IDS) == 3
    finally:
        installer.undo("identity")


@pytest.mark.usefixtures("installed")
def test_switched_off_by_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(status._is_on, "lazy_media", False)
    for _ in range(2):
        assert type(image_io({}).load_bytes(FILES["png"]).media) is Image.Image
    assert not len(RECORDS)


@pytest.mark.usefixtures("installed")
def test_evicted_images_are_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(media_records=2))
    contents = [files.saved(ellipses(f"one of {number}", files.SIZE), "PNG") for number in range(5)]
    hashes = [mm_hash(image_io({}).load_bytes(content)) for content in contents]
    assert len(RECORDS) == 2
    assert [mm_hash(image_io({}).load_bytes(content)) for content in contents] == hashes


@pytest.mark.usefixtures("installed")
def test_copies_are_plain() -> None:
    image_io({}).load_bytes(FILES["png"])
    for duplicate in (copy.deepcopy, copy.copy, lambda media: pickle.loads(pickle.dumps(media))):
        known = image_io({}).load_bytes(FILES["png"])
        twin = duplicate(known)
        assert mm_hash(twin) == mm_hash(known)
        assert np.asarray(twin).tobytes() == np.asarray(known).tobytes()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("way", ["bytes", "base64"])
def test_a_loader_that_overrides_vllms(way: str) -> None:
    """Known images have the pixels that it makes, each decoded once."""
    from vllm.multimodal.media.image import ImageMediaIO

    class Flipping(ImageMediaIO):
        def load_bytes(self, data: bytes) -> Any:
            opened = super().load_bytes(data)
            opened.media = opened.media.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return opened

    class Plain(ImageMediaIO):
        def load_bytes(self, data: bytes) -> Any:
            return super().load_bytes(data)

    content = FILES["png"]
    text = base64.b64encode(content).decode()
    expected = np.asarray(image_io({}).load_bytes(content))
    for kind, pixels in ((Plain, expected), (Flipping, expected[:, ::-1])):
        for number in range(3):
            before = counters.IMAGES_DECODED.value
            opened = kind().load_bytes(content) if way == "bytes" else kind().load_base64("image/png", text)
            assert np.array_equal(np.asarray(opened), pixels)
            assert counters.IMAGES_DECODED.value == before + 1, number


@pytest.mark.usefixtures("installed")
def test_many_threads_decode_once() -> None:
    image_io({}).load_bytes(FILES["jpeg"])
    known = image_io({}).load_bytes(FILES["jpeg"])
    before = counters.IMAGES_DECODED_LATE.value
    seen: list[bytes] = []
    threads = [threading.Thread(target=lambda: seen.append(known.media.tobytes())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert counters.IMAGES_DECODED_LATE.value == before + 1
