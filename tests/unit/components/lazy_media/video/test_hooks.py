# SPDX-License-Identifier: Apache-2.0
"""vLLM's video loader, parser and hasher with the component installed, beside stock, also for what is broken."""

import base64
import copy
import json
import pickle
import re
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mmcache_tools.harness import videos
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.parse import MultiModalDataParser
from vllm.renderers.hf import HfRenderer

from tests.unit.components.lazy_media.test_hooks import component
from vllm_mmcache.base import settings, status, tenant
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.lazy_media.media_info import RECORDS
from vllm_mmcache.components.lazy_media.video import hooks as loader
from vllm_mmcache.components.lazy_media.video.video_info import MAX_METADATA_BYTES, VIDEOS, record_of
from vllm_mmcache.components.lazy_media.video.vllm_video import KnownVideo
from vllm_mmcache.components.lazy_media.vllm_source import load
from vllm_mmcache.hooking import installer
from vllm_mmcache.hooking.subclasses import RendererMixin, derived
from vllm_mmcache.lifecycle.registry import COMPONENTS
from vllm_mmcache.metrics import counters
from vllm_mmcache.storage import record_store

FRAMES = videos.frames("a video", 12)
FILE = videos.mp4(FRAMES)
TEXT = videos.jpegs(FRAMES)
PADDING = struct.pack(">I4s", 4096, b"free") + bytes(4088)
TINY = videos.mp4(videos.frames("tiny", 3, (16, 16))) + PADDING  # frames smaller than the file: vLLM hashes the frames

FILES = {
    "mp4": FILE,
    "tiny": TINY,
    "without a frame": videos.mp4(videos.frames("one", 1, (16, 16))),
    "cut": FILE[: len(FILE) // 2],
    "broken inside": FILE[: len(FILE) // 2] + bytes(2000) + FILE[len(FILE) // 2 + 2000 :],
    "no video": b"These bytes are no video. " * 60,
    "nothing": b"",
}
TEXTS = {
    "jpegs": TEXT,
    "one": TEXT.partition(",")[0],
    "of two sizes": f"{TEXT},{videos.jpegs(videos.frames('larger', 1, (160, 96)))}",
    "a broken one": TEXT.replace(",", ",AAAA", 1),
    "no base64": f"{TEXT},???",
    "not ascii": f"{TEXT},ÄÖÜ",
    "nothing": "",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"num_frames": -1},
    "four": {"num_frames": 4},
    "none": {"num_frames": 0},
    "fps": {"fps": 1},
    "qwen": {"video_backend": "qwen3_vl"},
    "qwen fps": {"video_backend": "qwen3_vl", "fps": 1},
    "recovery": {"frame_recovery": True},
    "wrong backend": {"backend": "nonesuch"},
    "option of another backend": {"seek_mode": "exact"},
    "right indices": {"frames_indices": list(range(0, 24, 2)), "total_num_frames": 24},
    "a tuple": {"frames_indices": tuple(range(12))},
    "wrong indices": {"frames_indices": [1, 2, 3]},
    "too few": {"total_num_frames": 3},
    "a duration": {"duration": 7},
    "no duration": {"duration": "long"},
}


@pytest.fixture
def installed() -> Iterator[None]:
    with videos_component():
        yield


class videos_component:  # noqa: N801 -- a context manager
    """The component of images, with no video known."""

    def __init__(self) -> None:
        self._component = component()

    def __enter__(self) -> None:
        forget()
        self._component.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._component.__exit__(*error)


def forget() -> None:
    """Nothing is known of any video."""
    VIDEOS.clear()
    record_store.current().clear()


@pytest.fixture(autouse=True)
def unknown() -> None:
    forget()


def video_io(options: dict[str, Any], **of_images: Any) -> Any:
    return VideoMediaIO(ImageMediaIO(**of_images), **copy.deepcopy(options))


def parsed(video: Any, needs_metadata: bool) -> Any:
    """The parser's item for the hasher, and what it hands to the processor."""
    items = MultiModalDataParser(video_needs_metadata=needs_metadata).parse_mm_data({"video": [video]})["video"]
    return items.get_item_for_hash(0), items.get


def mm_hash(item: Any, algorithm: str = "blake3", **more: Any) -> str:
    return MultiModalHasher.hash_kwargs(algorithm, model_id="zoo", video=item, **more)


def look(opening: Callable[[], Any]) -> Any:
    """All that can be seen of what is loaded, identity first and frames last; or the error."""
    try:
        video = opening()
    except Exception as error:
        return type(error), re.sub("0x[0-9a-f]+", "0x", str(error)), type(error.__cause__)
    seen: list[Any] = []
    for needs_metadata in (False, True):
        item, get = parsed(video, needs_metadata)
        seen += [mm_hash(item, algorithm) for algorithm in ("blake3", "sha256")]
        seen.append(mm_hash(item, mm_processor_kwargs={"fps": 3}))
        item, get = parsed(video, needs_metadata)
        handed = get(0)
        seen.append(handed[1] if needs_metadata else None)
        pixels = handed[0] if needs_metadata else handed
        seen.append((type(pixels), pixels.shape, str(pixels.dtype), pixels.tobytes()))
    frames, metadata = video
    seen += [video[1], metadata, {name: type(value) for name, value in metadata.items()}, frames.tobytes()]
    return [*seen, video.original_bytes, video.io_config]


def by_bytes(content: bytes) -> list[Callable[[Any], Any]]:
    text = base64.b64encode(content).decode()
    return [
        lambda loader: loader.load_bytes(content),
        lambda loader: loader.load_base64("video/mp4", text),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FILES)
def test_files_as_stock(name: str, options: str, tmp_path: Path) -> None:
    """Unknown, known by bytes, known by text, and from a file: always what stock gives, errors too."""
    path = tmp_path / "video"
    path.write_bytes(FILES[name])
    ways = [*by_bytes(FILES[name]), lambda loader: loader.load_file(path)]
    stock = look(lambda: ways[0](video_io(OPTIONS[options])))
    with videos_component():
        for way in (*ways, *ways):
            assert look(lambda way=way: way(video_io(OPTIONS[options]))) == stock  # type: ignore[misc]
        if isinstance(stock, tuple):  # an error
            assert not len(VIDEOS)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", TEXTS)
def test_frames_as_stock(name: str, options: str) -> None:
    def opening() -> Any:
        return video_io(OPTIONS[options]).load_base64("video/JPEG", TEXTS[name])

    stock = look(opening)
    with videos_component():
        for _ in range(3):
            assert look(opening) == stock
        assert not len(RECORDS)  # a frame is no image
        if isinstance(stock, tuple):
            assert not len(VIDEOS)


def test_the_files_are_of_both_kinds() -> None:
    """Some open and some don't, and some have frames that are smaller than they are."""
    seen = {name: look(lambda name=name: video_io({}).load_bytes(FILES[name])) for name in FILES}  # type: ignore[misc]
    assert {name for name, found in seen.items() if isinstance(found, list)} >= {"mp4", "tiny"}
    assert {name for name, found in seen.items() if isinstance(found, tuple)} >= {"no video", "nothing"}
    frames, _ = video_io({}).load_bytes(TINY)
    assert 0 < frames.nbytes < len(TINY)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("needs_metadata", [False, True])
def test_known_videos_are_not_decoded(needs_metadata: bool) -> None:
    """Not to be opened, nor parsed, nor hashed, also in a way that nobody asked for before."""
    ways = [*by_bytes(FILE), lambda loader: loader.load_base64("video/jpeg", TEXT)]
    for way in ways:
        way(video_io({}))
    before = counters.VIDEOS_DECODED.value, counters.VIDEOS_AVOIDED.value
    for way in ways:
        known = way(video_io({}))
        item, get = parsed(known, needs_metadata)
        for options in ({}, {"fps": 1}, {"fps": 1}):
            mm_hash(item, mm_processor_kwargs=options)
        assert isinstance(known, KnownVideo)
        assert not known.frames.is_decoded
    assert (counters.VIDEOS_DECODED.value, counters.VIDEOS_AVOIDED.value - 3) == before
    late = counters.VIDEOS_DECODED_LATE.value
    get(0)
    get(0)
    assert known.frames.is_decoded
    assert (counters.VIDEOS_DECODED.value - 1, counters.VIDEOS_DECODED_LATE.value - 1) == (before[0], late)


@pytest.mark.usefixtures("installed")
def test_frames_that_are_hashed_are_decoded() -> None:
    """Control of the one above: where vLLM's hash is of the frames, the hash of black ones is not taken for it."""
    for _ in range(2):
        known = video_io({}).load_bytes(TINY)
    mm_hash(parsed(known, True)[0])
    assert known.frames.is_decoded


CHANGED: dict[str, Any] = {
    "a frame": (videos.jpegs([*FRAMES[:5], FRAMES[0], *FRAMES[6:]]), {}, {}),
    "num_frames": (TEXT, {"num_frames": 6}, {}),
    "fps": (TEXT, {"fps": 2}, {}),
    "indices": (TEXT, {"frames_indices": [*range(11), 12], "total_num_frames": 13}, {}),
    "the mode of the frames": (TEXT, {}, {"image_mode": "L"}),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("what", CHANGED)
def test_another_video_is_not_known(what: str) -> None:
    """Negative controls: what is changed is decoded."""
    video_io({}).load_base64("video/jpeg", TEXT)
    before = counters.VIDEOS_DECODED.value
    text, options, of_images = CHANGED[what]
    video_io(options, **of_images).load_base64("video/jpeg", text)
    assert counters.VIDEOS_DECODED.value == before + 1
    video_io({}).load_base64("video/jpeg", TEXT)
    assert counters.VIDEOS_DECODED.value == before + 1


@pytest.mark.usefixtures("installed")
def test_another_decoder_is_another_record(monkeypatch: pytest.MonkeyPatch) -> None:
    known = loader._key(b"video", video_io({}), False)
    assert known is not None
    assert "opencv" in str(known.options)
    monkeypatch.setattr(loader, "_made_by", lambda: "opencv-python-headless 0")
    assert loader._key(b"video", video_io({}), False) != known


def test_a_key_is_short_whatever_a_client_says() -> None:
    long = loader._key(b"video", video_io({"frames_indices": list(range(100_000))}), True)
    assert len(repr(long)) < 1000


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("options", [{"num_frames": 4}, {"fps": 1}, {"video_backend": "qwen3_vl"}])
def test_other_frames_of_the_same_file(options: dict[str, Any]) -> None:
    """Negative controls: another mm_hash, and others decoded."""
    one, other = video_io({}).load_bytes(FILE), video_io(options).load_bytes(FILE)
    assert isinstance(video_io(options).load_bytes(FILE), KnownVideo)
    assert len(VIDEOS) == 2
    assert mm_hash(parsed(one, True)[0]) != mm_hash(parsed(other, True)[0])


@pytest.mark.usefixtures("installed")
def test_the_same_bytes_as_text_and_as_file() -> None:
    """Bytes that are the text of a video/jpeg are no such video when they come as a file."""
    video_io({}).load_base64("video/jpeg", TEXT)
    with pytest.raises(ValueError, match="Could not open video stream"):
        video_io({}).load_bytes(TEXT.encode())


@pytest.mark.usefixtures("installed")
def test_metadata_is_each_requests_own() -> None:
    for _ in range(3):
        video = video_io({}).load_bytes(FILE)
        assert video.metadata["fps"] == 4.0
        video.metadata["fps"] = 99.0
        video.metadata["frames_indices"].clear()


@pytest.mark.usefixtures("installed")
def test_videos_are_known_to_their_tenant_alone() -> None:
    installer.install("identity", COMPONENTS["identity"].all_hooks(), vllm_version())

    def is_known(salt: str | None, way: Callable[[Any], Any]) -> bool:
        token = tenant.SALT.set(salt)
        loader = video_io({})
        tenant.SALT.reset(token)
        return not way(loader).frames.is_decoded

    try:
        for way in (*by_bytes(FILE), lambda loader: loader.load_base64("video/jpeg", TEXT)):
            forget()
            seen = [is_known(salt, way) for salt in (None, "a", "b", None, "a", "b")]
            assert seen == [False] * 3 + [True] * 3
    finally:
        installer.undo("identity")


@pytest.mark.usefixtures("installed")
def test_switched_off_by_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(status._is_on, "lazy_media", False)
    for way in (*by_bytes(FILE), lambda loader: loader.load_base64("video/jpeg", TEXT)):
        assert not isinstance(way(video_io({})), KnownVideo)
    assert not len(VIDEOS)


@pytest.mark.usefixtures("installed")
def test_evicted_videos_are_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(media_records=2))
    files = [videos.mp4(videos.frames(f"video {number}", 3)) for number in range(4)]
    hashes = [mm_hash(parsed(video_io({}).load_bytes(file), True)[0]) for file in files]
    assert len(VIDEOS) == 2
    assert [mm_hash(parsed(video_io({}).load_bytes(file), True)[0]) for file in files] == hashes


@pytest.mark.usefixtures("installed")
def test_copies_are_plain() -> None:
    for _ in range(2):
        video = video_io({}).load_bytes(FILE)
        seen = look(lambda: video)  # noqa: B023
        for duplicate in (copy.copy, copy.deepcopy, lambda media: pickle.loads(pickle.dumps(media))):
            assert look(lambda: duplicate(video)) == seen  # noqa: B023


@pytest.mark.usefixtures("installed")
def test_many_threads_decode_once() -> None:
    for _ in range(2):
        known = video_io({}).load_bytes(FILE)
    before = counters.VIDEOS_DECODED_LATE.value
    seen: list[bytes] = []
    threads = [threading.Thread(target=lambda: seen.append(known.frames.media.tobytes())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert counters.VIDEOS_DECODED_LATE.value == before + 1


@pytest.mark.usefixtures("installed")
def test_a_decode_that_fails_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        known = video_io({}).load_bytes(FILE)
    with monkeypatch.context() as patched:
        patched.setattr("cv2.VideoCapture.isOpened", lambda capture: False)
        with pytest.raises(ValueError, match="Could not open video stream"):
            np.asarray(known.frames)
    assert look(lambda: known) == look(lambda: video_io({}).load_bytes(FILE))


def test_what_a_record_can_not_say_is_not_kept() -> None:
    plain = {"fps": 4.0, "frames_indices": [0, 1], "duration": None}
    assert record_of((2, 8, 8, 3), plain) is not None
    for odd in (b"bytes", np.float64(4), (1, 2), {1: 2}, list(range(MAX_METADATA_BYTES))):
        assert record_of((2, 8, 8, 3), {**plain, "odd": odd}) is None


@pytest.mark.parametrize("options", ["plain", "four", "fps", "qwen", "right indices"])
def test_videos_are_opened_again_from_their_origin(options: str) -> None:
    """In a process that has no component: what stock opens, whether it was known or not."""
    ways: list[Callable[[Any], Any]] = [by_bytes(FILE)[0], lambda loader: loader.load_base64("video/jpeg", TEXT)]
    for way in ways:
        stock = look(lambda way=way: way(video_io(OPTIONS[options])))  # type: ignore[misc]
        with videos_component():
            origins = [way(video_io(OPTIONS[options])).origin for _ in range(2)]
        for origin in origins:
            content = origin.content()
            carried = replace(origin, options=json.loads(json.dumps(origin.options)), content=lambda: content)  # noqa: B023
            assert look(lambda carried=carried: load(carried)) == stock  # type: ignore[misc]


class Charges(list[int]):
    """As vLLM 0.33's budget of decoded bytes, of which nothing is too much."""

    charge = list.append


@pytest.mark.usefixtures("installed")
def test_known_videos_are_charged_like_decoded_ones() -> None:
    """Once: not again when they are decoded after all."""
    ways: list[Callable[[Any], Any]] = [by_bytes(FILE)[0], lambda loader: loader.load_base64("video/jpeg", TEXT)]
    for way, bytes_per_pixel in zip(ways, (3, 4), strict=True):
        way(video_io({}))
        loader = video_io({})
        loader.image_io.decoded_budget = Charges()
        known = way(loader)
        num_frames, height, width, _ = known.frames.media.shape
        assert loader.image_io.decoded_budget == [num_frames * height * width * bytes_per_pixel]


@pytest.mark.parametrize("names", [None, ["a"], [None, "b"], ["a", None], [None, None], ["a", "b", "c"]], ids=str)
def test_names_are_checked_as_stock_does(names: list[str | None] | None) -> None:
    """Of a video that is there and one that is not; nothing is decoded for it."""

    def check() -> Any:
        video = video_io({}).load_bytes(FILE)
        data = {"video": [video, None]}
        items = MultiModalDataParser(video_needs_metadata=True).parse_mm_data(data)
        try:
            renderer: Any = derived(RendererMixin, HfRenderer)
            renderer.__new__(renderer)._validate_mm_uuids(data, items, {} if names is None else {"video": names})
        except (ValueError, VLLMValidationError) as error:  # the second is no ValueError on 0.33
            return str(error), video
        return "", video

    stock, _ = check()
    assert bool(stock) == (names is not None and names != [None, "b"])
    with videos_component():
        check()
        seen, video = check()
        assert seen == stock
        assert not video.frames.is_decoded
