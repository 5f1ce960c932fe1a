# SPDX-License-Identifier: Apache-2.0
"""Thousands of hostile entries in every place of every kind: each is a miss that is counted, and no line of one runs.

Their frames are right, as those of somebody are who can write where entries are kept. Seeded: a case that fails is
named by its number. The controls: an entry that is not hostile is a hit, in the same place.
"""

import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scripts import soak
from tests.support import hostile
from tests.support.hostile import Marker
from tests.support.packages import SHAPE, features, file_tier, identity, load, redis_tier, save
from tests.support.sizes import scaled
from tests.support.store_server import TIMEOUT_S, Server
from tests.unit.components.lazy_processing.test_vllm_item_record import MAX_TOKENS, file_of, opened, processor_of
from vllm_mmcache.base import settings
from vllm_mmcache.components.features.package import pack
from vllm_mmcache.components.features.tiers import key_of as key_of_package
from vllm_mmcache.components.lazy_media.hooks import KnownImage
from vllm_mmcache.components.lazy_media.media_info import RECORDS, Key, MediaInfo, _name, find
from vllm_mmcache.components.lazy_media.video import video_info as videos
from vllm_mmcache.components.lazy_media.video.video_info import VIDEOS
from vllm_mmcache.components.lazy_processing import prepare
from vllm_mmcache.components.lazy_processing.prepare import ItemPreparer, ItemRequest
from vllm_mmcache.components.lazy_processing.vllm_item import is_deferred
from vllm_mmcache.components.lazy_processing.vllm_processor import inputs_of, process
from vllm_mmcache.storage import record_store
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.frame import frame, unframe
from vllm_mmcache.storage.record_store import RecordStore
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.tier import Tier, Value

NUM = {"item": 1400, "image": 1000, "video": 700, "package": 700}
"""Entries of a kind in each place: over 10,000 in all."""
AT_ONCE = 250
LONGEST_S = 2.0  # of one entry, on a machine that has other work
MOST_RSS_BYTES = 192 * 1024**2  # that a kind may add to the process, in all
MOST_BYTES = 64 * 1024**2  # that one entry may take for a moment
PLACES = ("ram", "disk", "remote")
SIZE = (200, 120)
IMAGE = MediaInfo(
    SIZE, "RGB", {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}, _mm_hashes={("q",): "a" * 64}
)
METADATA = {
    "fps": 2.0,
    "duration": 2.0,
    "total_num_frames": 4,
    "frames_indices": [0, 1, 2, 3],
    "video_backend": "opencv",
}

Read = Callable[[int], object]
"""Asks for the entry of a number; None for a miss."""


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Marker]:
    """A file that is written where a planted entry is executed; vLLM's own decoder may unpickle."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    found = Marker(tmp_path / "marker")
    yield found
    assert not found.path.exists(), "a planted entry was executed"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running_server: Server) -> Iterator[RecordStore]:
    """Records in all places."""
    running_server.client.flushall()
    store = f"{tmp_path / 'store'} {running_server.url}"
    values: dict[str, Any] = {"store": store, "store_remote_timeout_s": TIMEOUT_S, "store_ttl": 0}
    chosen = settings.Settings(**values)
    monkeypatch.setattr(settings, "_current", chosen)
    record_store.close()
    RECORDS.clear()
    VIDEOS.clear()
    yield record_store.current()
    record_store.close()
    RECORDS.clear()
    VIDEOS.clear()


def plant(store: RecordStore, place: str, framed: dict[bytes, bytes]) -> None:
    """Have these frames lie in a place by their keys; in RAM what is in them, which is all that lies there."""
    if place == "ram":
        for key, content in framed.items():
            value = unframe(key, content)
            store._ram.replace(key, Value(b"\xc1" if value is None else value, time.time()))
    else:
        (tier,) = (one for one in store._tiers if one.name == place)
        tier.backend.put_many(framed)


def assert_misses(
    place: str, num: int, key_of: Callable[[int], bytes], hostile_value: Callable[[Random], bytes], read: Read
) -> None:
    """Plant so many, and ask for each."""
    store = record_store.current()
    used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before = store.counts()[place]
    for start in range(0, num, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, num))
        planted = {}
        for number in numbers:
            chance, key = Random(number), key_of(number)
            value = hostile_value(chance)
            # One of another key's: another tenant's, another model's.
            planted[key] = frame(key_of(number + 1) if chance.random() < 0.05 else key, value)
        plant(store, place, planted)
        for number in numbers:
            begun = time.perf_counter()
            found = read(number)
            seconds = time.perf_counter() - begun
            assert found is None, f"case {number} is a hit: {planted[key_of(number)]!r}"[:2000]
            assert seconds < LONGEST_S, f"case {number} took {seconds:.1f} s"
    counts = store.counts()[place]
    assert counts["corrupt"] - before["corrupt"] == num
    assert counts["hits"] == before["hits"]
    assert counts["errors"] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - used_bytes < MOST_RSS_BYTES


def assert_hit(place: str, key: bytes, good: bytes, read: Callable[[], object]) -> None:
    """The control."""
    store = record_store.current()
    before = store.counts()[place]
    plant(store, place, {key: frame(key, good)})
    assert read() is not None
    counts = store.counts()[place]
    assert (counts["hits"], counts["corrupt"]) == (before["hits"] + 1, before["corrupt"])


class Items:
    """One image, and the side of a renderer that asks for its records under any name."""

    def __init__(self, zoo: Path) -> None:
        processor = processor_of("qwen3-vl", zoo)
        self.side = ItemPreparer(processor, processor.info.ctx.model_config, None)
        media, origin = opened(file_of(*SIZE, "RGB"))
        recorded = KnownImage(media.media, lambda: media.original_bytes, IMAGE, b"id", origin)
        self.asked = ItemRequest("image", recorded, None, {}, {})
        self.inputs = inputs_of(*self.side._plain(self.asked))
        self.good = self.record("qwen3-vl", zoo)
        self.others = [self.record(family, zoo) for family in ("gemma3", "internvl", "minicpm-v", "gemma4")]

    def record(self, family: str, zoo: Path) -> bytes:
        """What this image's record is for a model."""
        processor = processor_of(family, zoo)
        side = ItemPreparer(processor, processor.info.ctx.model_config, None)
        record = side._kinds_of("image").describe(process(processor, "image", self.asked.media, {})[0])
        assert record is not None
        return record

    def key(self, number: object) -> bytes:
        return self.side._key("image", str(number))

    def read(self, number: object) -> Any:
        return self.side._deferred(self.asked, self.inputs, str(number), self.side.cache)


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Items:
    return Items(tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize("place", PLACES)
def test_items(place: str, items: Items, marker: Marker, store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "may_defer", lambda: True)
    assert_hit(place, items.key("good"), items.good, lambda: items.read("good"))
    deferred, updates = items.read("good")
    assert is_deferred(deferred)
    assert 0 < sum(len(update.content.full) for update in updates) <= MAX_TOKENS
    assert_misses(
        place,
        scaled(NUM["item"]),
        items.key,
        lambda chance: hostile.item_record(chance, items.good, items.others, marker),
        items.read,
    )


def key_of(number: object) -> Key:
    return Key(str(number).encode(), ("options",))


@pytest.mark.parametrize("place", PLACES)
def test_images(place: str, marker: Marker, store: RecordStore) -> None:
    good = IMAGE.packed()
    assert good is not None
    assert_hit(place, _name(key_of("good")), good, lambda: find(key_of("good")))
    RECORDS.clear()
    assert_misses(
        place,
        scaled(NUM["image"]),
        lambda number: _name(key_of(number)),
        lambda chance: hostile.image_record(chance, good, marker),
        lambda number: find(key_of(number)),
    )
    assert not len(RECORDS)


@pytest.mark.parametrize("place", PLACES)
def test_videos(place: str, marker: Marker, store: RecordStore) -> None:
    record = videos.record_of((4, 64, 96, 3), METADATA)
    good = None if record is None else record.packed()
    assert good is not None

    def read(number: object) -> object:
        return find(key_of(number), VIDEOS, videos.unpacked)

    assert_hit(place, _name(key_of("good")), good, lambda: read("good"))
    VIDEOS.clear()
    assert_misses(
        place,
        scaled(NUM["video"]),
        lambda number: _name(key_of(number)),
        lambda chance: hostile.video_record(chance, good, marker),
        read,
    )
    assert not len(VIDEOS)


@pytest.mark.parametrize("place", ["disk", "remote"])
def test_packages(place: str, marker: Marker, tmp_path: Path, running_server: Server) -> None:
    """Of features, in files and in Valkey."""
    running_server.client.flushall()
    tier = file_tier(tmp_path / "store")
    if place == "remote":
        tier = redis_tier(running_server.url, timeout_s=TIMEOUT_S)
    assert save(tier, -1)
    used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    num = scaled(NUM["package"])
    for number in range(num):
        chance, who = Random(number), identity(number)
        planted = hostile.package(chance, who, SHAPE, bytes(features(number)), marker)
        write(tier, key_of_package(who), planted, running_server)
        begun = time.perf_counter()
        assert load(tier, number) is None, f"case {number} is a hit"
        assert time.perf_counter() - begun < LONGEST_S
    counts = tier.counts.snapshot()
    assert counts["set_aside"] == num
    assert counts["hits"] == counts["errors"] == 0
    write(tier, key_of_package(identity(0)), pack(identity(0), SHAPE, features(0)), running_server)
    assert load(tier, 0) == features(0), "the control"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - used_bytes < MOST_RSS_BYTES


def write(tier: Tier, name: bytes, packed: bytes, server: Server) -> None:
    if isinstance(tier.backend, FileBackend):
        file = tier.backend.path_of(name)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(packed)
        file.chmod(0o600)
    else:
        assert isinstance(tier.backend, RedisBackend)
        server.client.set(tier.backend.name_of(name), packed)


def test_how_many() -> None:
    """Over 10,000 here, and a million by `make soak`."""
    num = len(PLACES) * (NUM["item"] + NUM["image"] + NUM["video"]) + 2 * NUM["package"]
    assert num >= 10_000
    assert num * soak.TESTS["planted"][0] >= 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_one_entry_takes_little_memory(seed: int, items: Items, marker: Marker) -> None:
    """Of what is Python's; nothing that is refused gets as far as a tensor."""
    good_video = videos.record_of((4, 64, 96, 3), METADATA)
    assert good_video is not None
    packed = IMAGE.packed(), good_video.packed()
    for number in range(seed * 100, (seed + 1) * 100):
        chance = Random(number)
        values = (
            hostile.item_record(chance, items.good, items.others, marker),
            hostile.image_record(chance, packed[0] or b"", marker),
            hostile.video_record(chance, packed[1] or b"", marker),
        )
        tracemalloc.start()
        try:
            for value in values:
                assert items.side._restored(items.asked, items.inputs, value) is None
                videos.unpacked(value)
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, f"case {number}"
        finally:
            tracemalloc.stop()
