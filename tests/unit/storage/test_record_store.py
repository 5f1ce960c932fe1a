# SPDX-License-Identifier: Apache-2.0
"""Records in RAM and over tiers: found again, bounded, written behind, and never in the way of who asks."""

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.memory import traced
from tests.support.tiers import LONG_S, MemoryTier, record_tier, within
from vllm_mmcache.base import settings
from vllm_mmcache.metrics import table_sizes
from vllm_mmcache.storage import frame, record_store
from vllm_mmcache.storage.frame import MAX_VALUE_BYTES
from vllm_mmcache.storage.record_store import ENTRY_BYTES, MOST_WAITING_BYTES, RENEW_S, RecordStore
from vllm_mmcache.storage.tier import Value

KEYS = [frame.key("test", str(number)) for number in range(1000)]
KEY, OTHER = KEYS[:2]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """No records of one test in another."""
    record_store.close()
    yield
    record_store.close()


@pytest.fixture
def far() -> Iterator[MemoryTier]:
    """A tier that does not know when something was written, as Redis does not."""
    made = MemoryTier("remote", kind=record_store.RECORDS)
    yield made
    made.writing.open()


def in_force(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    monkeypatch.setattr(settings, "_current", settings.load_settings(values))


def counts(store: RecordStore, name: str) -> dict[str, float]:
    return {tier: every[name] for tier, every in store.counts().items()}


def test_nearest_first_and_filling_upwards(tmp_path: Path, far: MemoryTier) -> None:
    """Where it is found, it comes nearer; the counts say where."""

    def opened(folder: str) -> RecordStore:
        return RecordStore(1 << 20, [record_tier(tmp_path / folder), far])

    first = opened("a")
    first.put(KEY, b"value")
    assert [first.read(key, bytes) for key in (KEY, OTHER)] == [b"value", None]
    assert first.close(LONG_S)
    assert counts(first, "hits") == {"ram": 1, "disk": 0, "remote": 0}
    assert counts(first, "misses") == {"ram": 1, "disk": 1, "remote": 1}
    assert counts(first, "saved") == {"ram": 1, "disk": 1, "remote": 1}
    assert first.counts()["ram"].items() >= {"entries": 1, "bytes": ENTRY_BYTES + 5}.items()

    restarted = opened("a")
    assert [restarted.read(KEY, bytes) for _ in range(3)] == [b"value"] * 3
    assert restarted.close(LONG_S)
    assert counts(restarted, "hits") == {"ram": 2, "disk": 1, "remote": 0}
    assert counts(restarted, "saved")["disk"] == 0  # it was written a moment ago

    replica = opened("b")
    assert [replica.read(KEY, bytes) for _ in range(3)] == [b"value"] * 3
    assert replica.close(LONG_S)
    assert counts(replica, "hits") == {"ram": 2, "disk": 0, "remote": 1}
    assert counts(replica, "saved") == {"ram": 2, "disk": 1, "remote": 2}  # when it was written is not known there
    found = record_tier(tmp_path / "b").get(KEY, bytes)
    assert found is not None
    assert found[1] == b"value"


def test_settings_choose_the_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_force(monkeypatch)
    assert record_store.current().counts().keys() == {"ram"}
    in_force(monkeypatch, store=str(tmp_path))
    assert record_store.current().counts().keys() == {"ram", "disk"}
    in_force(monkeypatch, store=str(tmp_path), records_disk_bytes=0)
    assert record_store.current().counts().keys() == {"ram"}
    one = record_store.current()
    in_force(monkeypatch, store=str(tmp_path), records_disk_bytes=0)
    assert record_store.current() is one
    # Refused with the settings, unless those came from another process.
    monkeypatch.setattr(settings, "_current", settings.Settings(store="redis://localhost:1?no_such_option=1"))
    assert record_store.current().counts().keys() == {"ram"}  # and a line in the log
    in_force(monkeypatch, store="redis://localhost:1", records_ram_bytes=0)
    record_store.current().put(KEY, b"value")
    assert record_store.current().read(KEY, bytes) is None
    assert counts(record_store.current(), "dropped")["ram"] == 1


def test_a_key_that_went_away_puts_nothing_in_the_clear(tmp_path: Path) -> None:
    """As on another machine, which has the settings and not the file: records are in RAM alone."""
    chosen = settings.Settings(store=str(tmp_path / "store"), store_key_file=str(tmp_path / "none"))
    kept = RecordStore.of(chosen)
    assert kept.counts().keys() == {"ram"}
    kept.put(KEY, b"value")
    assert kept.read(KEY, bytes) == b"value"
    assert kept.close()
    assert not (tmp_path / "store").exists()


def test_what_is_current_is_closed_and_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_force(monkeypatch, store=str(tmp_path))
    first = record_store.current()
    first.put(KEY, b"value")
    in_force(monkeypatch, store=str(tmp_path), records_ram_bytes=1 << 20)
    assert record_store.current() is not first
    assert record_store.current().read(KEY, bytes) == b"value"  # it was written when the other one was closed
    record_store.current().clear()
    record_store.close()
    assert record_store.current().read(KEY, bytes) is None


def test_nothing_raises(far: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours in a tier, and one in here."""
    far.broken = KeyError
    kept = RecordStore(1 << 20, [far])
    assert kept.read(KEY, bytes) is None
    kept.put(KEY, b"value")
    assert kept.flush(LONG_S)
    assert kept.read(KEY, bytes) == b"value"
    assert kept.counts()["remote"].items() >= {"errors": 2, "misses": 1, "dropped": 1}.items()
    with monkeypatch.context() as patched:
        patched.setattr(kept, "_ram", None)
        assert kept.read(KEY, bytes) is None
        kept.put(KEY, b"value")
    assert kept.close()


def test_a_value_that_is_too_large(far: MemoryTier) -> None:
    kept = RecordStore(1 << 30, [far])
    kept.put(KEY, b"v" * MAX_VALUE_BYTES)
    kept.put(OTHER, b"v" * (MAX_VALUE_BYTES + 1))
    assert kept.flush(LONG_S)
    for store in (kept, RecordStore(1 << 30, [far])):
        assert [store.read(key, bytes) is not None for key in (KEY, OTHER)] == [True, False]
        assert store.close()
    assert counts(kept, "dropped") == {"ram": 1, "remote": 1}


def test_what_is_of_no_use_is_passed(tmp_path: Path, far: MemoryTier) -> None:
    """In RAM and below it: it is counted where it lies, and tiers that are farther are asked."""

    def read(value: bytes) -> bytes | None:
        return value if value.startswith(b"good") else None

    far.put_many({KEY: b"good"})
    near = record_tier(tmp_path)
    near.put_many({KEY: b"bad"})
    kept = RecordStore(1 << 20, [near, far])
    kept._ram.replace(KEY, Value(b"bad", time.time()))
    assert [kept.read(KEY, read) for _ in range(3)] == [b"good"] * 3
    assert counts(kept, "corrupt") == {"ram": 1, "disk": 1, "remote": 0}
    assert counts(kept, "hits") == {"ram": 2, "disk": 0, "remote": 1}
    assert kept.flush(LONG_S)
    assert near.get(KEY, read) is not None  # written over
    kept._ram.replace(OTHER, Value(b"bad", time.time()))
    assert [kept.read(OTHER, read) for _ in range(3)] == [None] * 3
    assert counts(kept, "corrupt")["ram"] == 2  # it is gone
    assert kept.close()


def test_writing_is_never_waited_for(tmp_path: Path, far: MemoryTier) -> None:
    """While a tier hangs, what waits for it is bounded, all is found in RAM, and the other tier has it all."""
    far.writing.shut()
    near = record_tier(tmp_path, 1 << 28)
    kept = RecordStore(1 << 30, [near, far])
    value = b"v" * MAX_VALUE_BYTES
    for start in range(0, len(KEYS), 100):
        for key in KEYS[start : start + 100]:
            kept.put(key, value)
        assert kept._writers[0].flush(LONG_S)
    waiting = kept._writers[1].size()
    assert waiting.bytes is not None
    assert waiting.bytes <= MOST_WAITING_BYTES
    assert kept.waiting().budget_bytes == 2 * MOST_WAITING_BYTES
    assert all(kept.read(key, bytes) == value for key in KEYS)
    dropped = counts(kept, "dropped")["remote"]
    assert dropped > len(KEYS) // 2
    assert counts(kept, "saved") == {"ram": len(KEYS), "disk": len(KEYS), "remote": 0}
    assert not kept.flush(0.01)
    far.writing.open()
    assert kept.flush(LONG_S)
    assert kept.waiting().bytes == 0
    assert counts(kept, "saved")["remote"] == len(KEYS) - dropped
    assert kept.close()
    kept.put(KEY, b"after the end")
    assert counts(kept, "dropped") == {"ram": 0, "disk": 1, "remote": dropped + 1}


def test_forgotten_but_for_what_others_share(tmp_path: Path, far: MemoryTier) -> None:
    """What waits is not written any more."""
    shared = MemoryTier("shared", kind=record_store.RECORDS)
    shared.memory.is_shared = True
    near = record_tier(tmp_path)
    kept = RecordStore(1 << 20, [near, far, shared])
    kept.put(KEY, b"value")
    assert kept.flush(LONG_S)
    kept.clear()
    assert [len(far.packages), len(shared.packages), near.backend.sizes()[0]] == [0, 1, 0]
    assert kept.counts()["ram"]["entries"] == 0
    assert shared.writing.has_come()
    shared.writing.shut()
    kept.put(KEY, b"again")
    assert shared.writing.has_come()  # it is being written
    kept.put(OTHER, b"value")
    clearing = threading.Thread(target=kept.clear)
    clearing.start()
    assert within(LONG_S, lambda: kept._writers[2].size().bytes == 0)
    shared.writing.open()
    clearing.join()
    assert kept.close()
    assert [shared.get(key, bytes) is not None for key in (KEY, OTHER)] == [True, False]


def test_what_is_used_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From RAM and from disk alike, once per RENEW_S; reading alone writes nothing."""
    kept = RecordStore(1 << 20, [record_tier(tmp_path)])
    now = time.time()
    kept.put(KEY, b"value")
    assert kept.flush(LONG_S)

    def read_at(seconds: float, kept: RecordStore) -> tuple[float, float]:
        monkeypatch.setattr(time, "time", lambda: now + seconds)
        for _ in range(3):
            assert kept.read(KEY, bytes) == b"value"
        assert kept.flush(LONG_S)
        found = record_tier(tmp_path).get(KEY, bytes)
        assert found is not None
        return counts(kept, "saved")["disk"], round(found[0].written_s - int(now))

    assert read_at(RENEW_S - 10, kept)[0] == 1
    saved, written_s = read_at(RENEW_S + 10, kept)
    assert saved == 2
    assert written_s >= RENEW_S
    kept.close()
    again = RecordStore(1 << 20, [record_tier(tmp_path)])
    assert read_at(RENEW_S + 20, again)[0] == 0
    assert read_at(3 * RENEW_S, again)[0] == 1
    again.close()


@pytest.mark.parametrize(("ttl_s", "renew_s"), [(0, RENEW_S), (10 * 86400, RENEW_S), (1000, 500)])
def test_what_is_used_is_written_again_before_it_expires(tmp_path: Path, ttl_s: int, renew_s: float) -> None:
    kept = RecordStore(1 << 20, [record_tier(tmp_path / "a"), record_tier(tmp_path / "b", ttl_s=ttl_s)])
    assert kept.renew_s == renew_s
    assert kept.close()


@pytest.mark.slow
def test_many_threads(tmp_path: Path) -> None:
    kept = RecordStore(100_000, [record_tier(tmp_path, 1 << 26)])
    wrong = []

    def work(seed: int) -> None:
        for step in range(1500):
            number = (step * 7 + seed) % len(KEYS)
            if step % 3 == 0:
                kept.put(KEYS[number], b"%d " % number * 50)
            elif kept.read(KEYS[number], bytes) not in (None, b"%d " % number * 50):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kept.close(60)
    assert (counts(kept, "errors")["disk"], counts(kept, "corrupt")["disk"]) == (0, 0)
    assert kept.counts()["ram"]["bytes"] <= 100_000
    again = RecordStore(100_000, [record_tier(tmp_path, 1 << 26)])
    found = {number: again.read(key, bytes) for number, key in enumerate(KEYS)}
    assert any(found.values())
    assert all(value in (None, b"%d " % number * 50) for number, value in found.items())
    assert again.close(60)


def test_ram_lets_go_of_what_was_used_longest_ago() -> None:
    """By its bytes; a value that alone is too much is not kept, nor what was there before served for it."""
    kept = RecordStore(3 * (ENTRY_BYTES + 10))
    for key in KEYS[:3]:
        kept.put(key, b"0123456789")
    assert kept.read(KEYS[0], bytes)
    kept.put(KEYS[3], b"0123456789")
    assert [kept.read(key, bytes) is not None for key in KEYS[:4]] == [True, False, True, True]
    kept.put(KEYS[0], b"")
    assert kept.read(KEYS[0], bytes) == b""
    assert kept.counts()["ram"].items() >= {"entries": 3, "bytes": 3 * ENTRY_BYTES + 20, "dropped": 0}.items()
    kept.put(KEYS[3], b"v" * 5000)
    assert kept.read(KEYS[3], bytes) is None
    assert counts(kept, "dropped") == {"ram": 1}


@pytest.mark.slow
def test_records_cost_no_more_than_they_count_for() -> None:
    """Measured: what a record really takes in RAM beside its value."""
    kept = RecordStore(1 << 30)
    with traced(__file__) as num_bytes:
        for _ in range(5000):
            kept.put(secrets.token_bytes(32), secrets.token_bytes(300))
        taken_bytes = num_bytes()
    print(taken_bytes // 5000, "bytes each")
    assert 0.5 * kept.counts()["ram"]["bytes"] < taken_bytes <= kept.counts()["ram"]["bytes"]


def test_metrics_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY

    def sample(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"mmcache:{name}", labels) or 0.0

    in_force(monkeypatch, store=str(tmp_path))
    before = [sample("record_hits_total", place="ram"), sample("record_saved_total", place="disk")]
    record_store.current().put(KEY, b"value")
    record_store.current().read(KEY, bytes)
    assert record_store.current().flush(LONG_S)
    after = [sample("record_hits_total", place="ram"), sample("record_saved_total", place="disk")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]
    table_sizes.show()
    assert sample("table_bytes", table="records") == ENTRY_BYTES + 5
    assert sample("table_budget_bytes", table="records") == 64 << 20
    assert sample("table_budget_bytes", table="records_waiting") == MOST_WAITING_BYTES
    assert sample("record_disk_budget_bytes") == 1 << 30
    assert sample("record_disk_bytes") == record_tier(tmp_path).backend.sizes()[1] > 0
