# SPDX-License-Identifier: Apache-2.0
"""Bounded tables: what goes first, both budgets, threads, and that an entry costs no more than it counts for."""

import json
import secrets
import threading

import pytest

from tests.support.memory import traced
from vllm_mmcache.base.lru import Budget, LruTable, Size
from vllm_mmcache.components.lazy_media.media_info import MAX_MM_HASHES, RECORD_COST_BYTES, Key, MediaInfo, unpacked
from vllm_mmcache.components.lazy_media.video.video_info import MAX_METADATA_BYTES, record_of
from vllm_mmcache.components.lazy_media.video.video_info import RECORD_COST_BYTES as VIDEO_COST_BYTES
from vllm_mmcache.content.base64_image import TEXT_COST_BYTES


def test_what_is_no_record_is_none() -> None:
    """Nested more deeply than a parser goes, too."""
    nested = (b'[1, 2, "RGB", ' + b"[" * 100_000, b"[" * 900 + b"]" * 900)
    for packed in (b"", b"[", b"[]", b"3", b'[1, 2, "RGB", 3, []]', *nested):
        assert unpacked(packed) is None


def table(entries: int = 3, size_bytes: int = 1000) -> LruTable[int, str]:
    return LruTable(lambda: Budget(entries, size_bytes), 100)


def test_least_recently_used_goes_first() -> None:
    known = table()
    for key in range(3):
        known.admit(key, str(key))
    assert known.get(0) == "0"
    known.admit(3, "3")
    assert [known.get(key) for key in range(4)] == ["0", None, "2", "3"]


def test_the_first_value_is_kept() -> None:
    known = table()
    assert known.admit(1, "first") == "first"
    assert known.admit(1, "second") == "first"


def test_replaced() -> None:
    known = table()
    for number in range(3):
        assert known.replace(number, "first") is None
    assert known.replace(0, "second") == "first"
    known.replace(3, "first")
    assert [known.get(key) for key in range(4)] == ["second", None, "first", "first"]


def test_bytes_budget() -> None:
    known = table(entries=100, size_bytes=250)
    for key in range(10):
        known.admit(key, str(key))
    assert (len(known), known.size_bytes) == (2, 200)
    known.clear()
    assert not len(known)


def by_cost(size_bytes: int = 10, entries: int = 100) -> LruTable[str, str]:
    """A table whose values count by their length."""
    return LruTable(lambda: Budget(entries, size_bytes), len)


def held(known: LruTable[str, str]) -> tuple[str, int]:
    """The keys, those of longest ago first, and what they count for."""
    return "".join(known._entries), known.size_bytes


def test_values_of_different_cost() -> None:
    known = by_cost()
    for key, value in ("a", "xxxx"), ("b", "xxx"), ("c", "xx"):
        known.admit(key, value)
    assert held(known) == ("abc", 9)
    known.admit("d", "xxxxxx")  # as many go as must
    assert held(known) == ("cd", 8)
    known.replace("c", "xxxx")
    assert held(known) == ("dc", 10)
    known.replace("d", "")
    assert held(known) == ("cd", 4)
    assert known.size() == Size(2, 4, 10)


def test_one_that_alone_is_too_much_goes_alone() -> None:
    """And what was there before it is not found for it."""
    known = by_cost()
    known.admit("a", "xxxx")
    known.admit("b", "x" * 11)
    assert held(known) == ("a", 4)
    assert known.replace("a", "x" * 11) == "xxxx"
    assert held(known) == ("", 0)
    known.admit("a", "x" * 10)
    assert held(known) == ("a", 10)


def test_removed() -> None:
    known = by_cost()
    known.admit("a", "xxxx")
    assert known.remove("a") == "xxxx"
    assert known.remove("a") is None
    assert ("a" in known, held(known)) == (False, ("", 0))


def test_entries_count_beside_what_they_cost() -> None:
    known = by_cost(entries=2)
    for key in "abc":
        known.admit(key, "")
    assert held(known) == ("bc", 0)


def test_a_budget_that_shrinks_holds_with_the_next_one() -> None:
    budget = [Budget(100, 10)]
    known: LruTable[str, str] = LruTable(lambda: budget[0], len)
    for key in "abc":
        known.admit(key, "xxx")
    budget[0] = Budget(100, 4)
    known.admit("d", "x")
    assert held(known) == ("cd", 4)
    budget[0] = Budget(0, 0)
    known.admit("e", "")
    assert held(known) == ("", 0)


def test_threads() -> None:
    known = table(entries=50, size_bytes=10**6)

    def work(first: int) -> None:
        for key in range(first, first + 2000):
            known.admit(key, str(key))
            assert known.get(key) in (None, str(key))

    threads = [threading.Thread(target=work, args=(number * 1000,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(known) == 50


def test_mm_hashes_are_bounded() -> None:
    record = MediaInfo((1, 1), "RGB", None)
    for number in range(2 * MAX_MM_HASHES):
        record.keep_mm_hash(number, str(number))
    assert record.mm_hash(0) is None
    assert record.mm_hash(2 * MAX_MM_HASHES - 1) == str(2 * MAX_MM_HASHES - 1)


@pytest.mark.slow
def test_entries_cost_no_more_than_they_count_for() -> None:
    """Measured: what a full record of an image, a text, and a full record of a video, really take."""

    def new_record(records: LruTable[Key, MediaInfo]) -> None:
        record = MediaInfo((1280, 720), "RGB", {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)})
        for _ in range(MAX_MM_HASHES):
            record.keep_mm_hash(("blake3", "image", secrets.token_hex(32)), secrets.token_hex(32))
        records.admit(Key(secrets.token_bytes(32), ("ImageMediaIO", "RGB", (255, 255, 255), 10**9)), record)

    def new_text(texts: LruTable[bytes, bytes]) -> None:
        texts.admit(secrets.token_bytes(32), secrets.token_bytes(32))

    def new_video(videos: LruTable[Key, MediaInfo]) -> None:
        component = MAX_METADATA_BYTES - len(json.dumps({"frames": ""}))
        record = record_of((64, 720, 1280, 3), {"frames": secrets.token_hex(component // 2)})
        assert record is not None
        for _ in range(MAX_MM_HASHES):
            record.keep_mm_hash(("blake3", "video", secrets.token_hex(32)), secrets.token_hex(32))
        videos.admit(Key(secrets.token_bytes(32), ("VideoMediaIO", "-1", secrets.token_bytes(32), "RGB")), record)

    costs = (
        (new_record, RECORD_COST_BYTES),
        (new_text, TEXT_COST_BYTES),
        (new_video, VIDEO_COST_BYTES),
    )
    for new, cost_bytes in costs:
        known: LruTable[object, object] = LruTable(lambda: Budget(10**6, 10**9), cost_bytes)
        with traced(__file__) as num_bytes:
            for _ in range(500):
                new(known)  # type: ignore[arg-type]
            taken_bytes = num_bytes()
        print(new.__name__, taken_bytes // 500, "bytes each")
        assert 0.3 * known.size_bytes < taken_bytes <= known.size_bytes
