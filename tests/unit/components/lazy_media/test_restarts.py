# SPDX-License-Identifier: Apache-2.0
"""What was decoded once is known after a restart and on other servers, and equal to stock; anything else is a miss."""

import base64
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from PIL import Image, features

from tests.support import files
from tests.support.sizes import scaled
from tests.support.tiers import LONG_S, record_tier
from tests.unit.components.lazy_media.test_hooks import FILES, OPTIONS, component, image_io, look, mm_hash
from vllm_mmcache.base import settings
from vllm_mmcache.components.lazy_media import hooks as loader
from vllm_mmcache.components.lazy_media.lazy_image import LazyImage
from vllm_mmcache.components.lazy_media.media_info import RECORDS, Key, MediaInfo, _name, admit, find, unpacked
from vllm_mmcache.content.base64_image import CONTENT_IDS
from vllm_mmcache.metrics import counters
from vllm_mmcache.storage import record_store
from vllm_mmcache.storage.frame import frame

NO_RECORDS = [
    b"",
    b"\xff",
    b"7",
    b"[]",
    b"{}",
    b'["1", 2, "RGB", null, []]',
    b"[1, 2, 3, null, []]",
    b'[1, 2, "RGB", 3, []]',
    b'[1, 2, "RGB", null]',
    b'[1, 2, "RGB", null, 3]',
    b'[1, 2, "RGB", null, [[]]]',
    b'[1, 2, "RGB", null, [["question", 3]]]',
    b'[1, 2, "RGB", null, [["question", ["a"], "hash"]]]',
]


def restart() -> None:
    """A process that knows nothing, and what was kept for it."""
    assert record_store.current().flush(LONG_S)
    record_store.close()
    CONTENT_IDS.clear()
    RECORDS.clear()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The component, with records in a directory."""
    monkeypatch.setattr(settings, "_current", settings.Settings(store=str(tmp_path / "store")))
    with component():
        yield tmp_path / "store"
    restart()


def is_known(content: bytes, options: str = "RGB") -> bool:
    return isinstance(image_io(OPTIONS[options]).load_bytes(content).media, LazyImage)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FILES)
def test_as_stock_after_a_restart(name: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes and by text; what stock refuses is never kept."""
    content = FILES[name]
    text = base64.b64encode(content).decode()
    stock = look(lambda: image_io(OPTIONS[options]).load_bytes(content))
    monkeypatch.setattr(settings, "_current", settings.Settings(store=str(tmp_path)))
    with component():
        restart()
        assert look(lambda: image_io(OPTIONS[options]).load_bytes(content)) == stock
        restart()
        before = counters.IMAGES_DECODED.value
        ways: list[Callable[[Any], Any]] = [
            lambda loader: loader.load_base64("image/png", text),
            lambda loader: loader.load_bytes(content),
        ]
        for way in ways:
            if isinstance(stock[0], type):  # an error
                assert look(lambda way=way: way(image_io(OPTIONS[options]))) == stock  # type: ignore[misc]
                assert not len(RECORDS)
                continue
            media = way(image_io(OPTIONS[options]))
            if isinstance(media.media, LazyImage):
                assert (mm_hash(media), media.size, media.mode) == (stock[0][0], stock[1], stock[2])
                assert media.io_config == stock[4]
                assert counters.IMAGES_DECODED.value == before
            assert look(lambda: media) == stock  # noqa: B023
            restart()
            before = counters.IMAGES_DECODED.value
    restart()


@pytest.mark.slow
@pytest.mark.usefixtures("store")
@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    mode=st.sampled_from(["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "F"]),
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"]),
    orientation=st.sampled_from([None, 1, 2, 3, 4, 5, 6, 7, 8]),
    options=st.sampled_from(list(OPTIONS)),
    seed=st.integers(0, 2**31),
)
@given_settings(
    max_examples=scaled(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_images(
    size: tuple[int, int], mode: str, kind: str, orientation: int | None, options: str, seed: int
) -> None:
    """What is kept is what the decoded image was: size, mode, settings, and with it the mm_hash."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    image = Image.new(mode, size, 7) if mode in ("I;16", "F") else image.convert(mode)
    exif = {} if orientation is None else {"exif": files.exif(Orientation=orientation)}
    try:
        content = files.saved(image, kind, **exif)
    except (OSError, KeyError, ValueError):  # not every format has every mode
        return
    stock = image_io(OPTIONS[options]).load_bytes.__wrapped__(content)
    restart()
    assert look(lambda: image_io(OPTIONS[options]).load_bytes(content)) == look(lambda: stock)
    restart()
    known = image_io(OPTIONS[options]).load_bytes(content)
    assert isinstance(known.media, LazyImage)
    assert (known.size, known.mode, known.io_config) == (stock.size, stock.mode, stock.io_config)
    assert mm_hash(known) == mm_hash(stock)
    assert not known.media.is_decoded
    assert look(lambda: known) == look(lambda: stock)


@pytest.mark.usefixtures("store")
def test_other_facts_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    content = FILES["png rgba"]
    assert not is_known(content)
    restart()
    assert is_known(content)
    restart()
    assert not is_known(content[:-1] + b"\x00" + content[-1:])
    assert not is_known(content, "on black")
    for module in ("vllm", "PIL", "numpy"):
        with monkeypatch.context() as other:
            other.setattr(sys.modules[module], "__version__", "another")
            loader._facts.cache_clear()
            restart()
            assert not is_known(content)
        loader._facts.cache_clear()
    with monkeypatch.context() as other:
        other.setattr(features, "version", lambda name: "another")
        loader._facts.cache_clear()
        restart()
        assert not is_known(content)
    loader._facts.cache_clear()
    with monkeypatch.context() as other:
        other.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
        restart()
        assert not is_known(content)
    restart()
    assert is_known(content)


@pytest.mark.parametrize("how", ["of another image", "cut", "of another format", "no record"])
def test_what_was_planted_is_a_miss(store: Path, how: str) -> None:
    content, other = FILES["png"], FILES["jpeg rotated"]
    for one in (content, other):
        image_io({}).load_bytes(one)
    (key,), (other_key,) = (
        [key for key in RECORDS._entries if RECORDS._entries[key].size == size]
        for size in (files.SIZE, files.SIZE[::-1])
    )
    restart()
    backend = record_tier(store).backend
    with backend.open(_name(other_key)) as entry:
        assert entry is not None
        kept = bytearray(entry.num_bytes)
        entry.read_into(0, memoryview(kept), 0.0)
    good = MediaInfo(files.SIZE, "RGB", None).packed() or b""
    planted = {
        "of another image": bytes(kept),
        "cut": frame(_name(key), good)[:-1],
        "of another format": b"mmcr\x00" + frame(_name(key), good)[5:],
        "no record": frame(_name(key), b"[1, 2, null]"),
    }
    backend.put_many({_name(key): planted[how]})
    assert not is_known(content)
    restart()
    assert is_known(content)


@pytest.mark.parametrize(
    ("io_config", "is_kept"),
    [
        (None, True),
        ({}, True),
        ({"image_mode": None, "rgba_background_color": (255, 255, 255)}, True),
        ({"nested": ((1, 2), "a")}, True),
        ({"a list": [1, 2]}, False),
        ({"an object": object()}, False),
        ({1: 2}, False),
    ],
)
def test_only_what_comes_back_equal_is_kept(io_config: dict[Any, Any] | None, is_kept: bool) -> None:
    record = MediaInfo((3, 4), "RGB", io_config)
    kept = record.packed()
    assert (kept is not None) is is_kept
    if kept is not None:
        again = unpacked(kept)
        assert again is not None
        assert (again.size, again.mode, again.io_config) == (record.size, record.mode, record.io_config)


@pytest.mark.parametrize("content", NO_RECORDS)
def test_what_is_no_record_of_an_image(content: bytes) -> None:
    assert unpacked(content) is None


@pytest.mark.usefixtures("store")
def test_what_is_used_for_long_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key(b"content", ("options",))
    admit(key, MediaInfo((3, 4), "RGB", None))
    assert find(key) is not None
    assert record_store.current().flush(LONG_S)
    saved = record_store.current().counts()["disk"]["saved"]
    record = RECORDS.get(key)
    assert record is not None
    record._kept_s -= record_store.RENEW_S
    for _ in range(3):
        assert find(key) is record
    assert record_store.current().flush(LONG_S)
    assert record_store.current().counts()["disk"]["saved"] == saved + 1
