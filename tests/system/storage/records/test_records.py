# SPDX-License-Identifier: Apache-2.0
"""Records over their places: found again, bounded, checked, and never in the way of who asks."""

import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from vllm_mmcache.storage.records import MAX_VALUE_BYTES, Records
from vllm_mmcache.storage.records.disk import DiskPlace
from vllm_mmcache.storage.records.place import Place
from vllm_mmcache.storage.records.ram import ENTRY_BYTES, Entry, Ram
from vllm_mmcache.storage.records.writer import MOST_WAITING_BYTES

from tests.support.memory import traced
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S
from vllm_mmcache.base import settings
from vllm_mmcache.metrics import table_sizes
from vllm_mmcache.storage import records

KEYS = [records.key("test", str(number)) for number in range(1000)]


class Broken(Place):
    """A place with a bug, and one that waits."""

    name = "disk"
    failures = (OSError,)

    def __init__(self, go_on: threading.Event | None = None) -> None:
        super().__init__("a test", 0.0, 0.0)
        self._go_on = go_on

    def clear(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def _load(self, key: bytes) -> tuple[bytes, float] | None:
        raise KeyError("a bug")

    def _save(self, frames: Mapping[bytes, bytes]) -> int:
        if self._go_on is None:
            raise KeyError("a bug")
        assert self._go_on.wait(60)
        return len(frames)


def in_force(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    monkeypatch.setattr(settings, "_current", settings.load_settings(values))


def test_in_every_place(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is found, it comes nearer; the counts say where."""
    in_force(monkeypatch, store=f"{tmp_path} {server.url}", store_remote_timeout_s=TIMEOUT_S)
    records.current().put(KEYS[0], b"value")
    assert records.current().get(KEYS[0]) == b"value"
    assert records.current().get(KEYS[1]) is None
    counts = records.current().counts()
    assert counts["ram"] | {"hits": 1, "misses": 1, "saved": 1, "entries": 1} == counts["ram"]
    assert counts["disk"]["misses"] == counts["remote"]["misses"] == 1

    assert records.current().flush(LONG_S)
    records.close()  # a restart
    for source in ("disk", "ram"):
        assert records.current().get(KEYS[0]) == b"value"
        assert records.current().counts()[source]["hits"] == 1
    assert records.current().counts()["remote"]["hits"] == 0

    in_force(monkeypatch, store=f"{tmp_path / 'another'} {server.url}", store_remote_timeout_s=TIMEOUT_S)
    assert records.current().get(KEYS[0]) == b"value"  # another server
    assert records.current().counts()["remote"]["hits"] == 1
    assert records.current().flush(LONG_S)
    records.close()
    in_force(monkeypatch, store=str(tmp_path / "another"))
    assert records.current().get(KEYS[0]) == b"value"
    records.current().clear()
    assert records.current().get(KEYS[0]) is None
    records.close()
    assert records.current().get(KEYS[0]) is None


def test_settings_choose_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_force(monkeypatch)
    assert records.current().counts().keys() == {"ram"}
    in_force(monkeypatch, store=str(tmp_path))
    assert records.current().counts().keys() == {"ram", "disk"}
    in_force(monkeypatch, store=str(tmp_path), records_disk_bytes=0)
    assert records.current().counts().keys() == {"ram"}
    one = records.current()
    in_force(monkeypatch, store=str(tmp_path), records_disk_bytes=0)
    assert records.current() is one
    # Refused with the settings, unless those came from another process.
    monkeypatch.setattr(settings, "_current", settings.Settings(store="redis://localhost:1?no_such_option=1"))
    assert records.current().counts().keys() == {"ram"}  # and a line in the log
    in_force(monkeypatch, store="redis://localhost:1", records_ram_bytes=0)
    records.current().put(KEYS[0], b"value")
    assert records.current().get(KEYS[0]) is None
    assert records.current().counts()["ram"]["dropped"] == 1


def test_nothing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Records(1 << 20, [Broken()])
    assert kept.get(KEYS[0]) is None
    kept.put(KEYS[0], b"value")
    assert kept.flush(LONG_S)
    assert kept.get(KEYS[0]) == b"value"
    assert kept.counts()["disk"] | {"errors": 2, "misses": 1, "dropped": 1} == kept.counts()["disk"]
    monkeypatch.setattr(kept, "_ram", None)
    assert kept.get(KEYS[0]) is None
    kept.put(KEYS[0], b"value")
    assert kept.close()


def test_a_value_that_is_too_large() -> None:
    kept = Records(1 << 30)
    kept.put(KEYS[0], b"v" * MAX_VALUE_BYTES)
    kept.put(KEYS[1], b"v" * (MAX_VALUE_BYTES + 1))
    assert kept.get(KEYS[0]) is not None
    assert kept.get(KEYS[1]) is None
    assert kept.counts()["ram"]["dropped"] == 1


def test_writing_is_never_waited_for() -> None:
    """While a place hangs, what is waiting is bounded, and all is found in RAM."""
    go_on = threading.Event()
    kept = Records(1 << 30, [Broken(go_on)])
    value = b"v" * MAX_VALUE_BYTES
    for key in KEYS:
        kept.put(key, value)
    assert kept._writer._waiting_bytes <= MOST_WAITING_BYTES
    assert all(kept.get(key) == value for key in KEYS)
    dropped = kept.counts()["disk"]["dropped"]
    assert dropped > len(KEYS) // 2
    assert not kept.flush(0.01)
    go_on.set()
    assert kept.flush(LONG_S)
    assert kept._writer._waiting_bytes == 0
    assert kept.counts()["disk"]["saved"] == len(KEYS) - dropped
    assert kept.close()
    kept.put(KEYS[0], b"after the end")
    assert kept.counts()["disk"]["dropped"] == dropped + 1


def test_what_is_used_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From RAM and from disk alike, once per RENEW_S; reading alone writes nothing."""
    kept = Records(1 << 20, [DiskPlace(tmp_path, 1 << 20)])
    now = time.time()
    kept.put(KEYS[0], b"value")
    assert kept.flush(LONG_S)

    def read_at(seconds: float, kept: Records) -> tuple[int, float]:
        monkeypatch.setattr(time, "time", lambda: now + seconds)
        for _ in range(3):
            assert kept.get(KEYS[0]) == b"value"
        assert kept.flush(LONG_S)
        entry = DiskPlace(tmp_path, 1 << 20).get(KEYS[0])
        assert entry is not None
        return kept.counts()["disk"]["saved"], round(entry.renewed_s - int(now))

    assert read_at(records.RENEW_S - 10, kept)[0] == 1
    saved, written_s = read_at(records.RENEW_S + 10, kept)
    assert saved == 2
    assert written_s >= records.RENEW_S
    kept.close()
    again = Records(1 << 20, [DiskPlace(tmp_path, 1 << 20)])
    assert read_at(records.RENEW_S + 20, again)[0] == 0
    assert read_at(3 * records.RENEW_S, again)[0] == 1
    again.close()


@pytest.mark.slow
def test_many_threads(tmp_path: Path) -> None:
    kept = Records(100_000, [DiskPlace(tmp_path, 1 << 26)])
    wrong = []

    def work(seed: int) -> None:
        for step in range(1500):
            number = (step * 7 + seed) % len(KEYS)
            if step % 3 == 0:
                kept.put(KEYS[number], b"%d " % number * 50)
            elif kept.get(KEYS[number]) not in (None, b"%d " % number * 50):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kept.close(60)
    counts = kept.counts()
    assert counts["disk"]["errors"] == counts["disk"]["corrupt"] == 0
    assert counts["ram"]["bytes"] <= 100_000
    again = Records(100_000, [DiskPlace(tmp_path, 1 << 26)])
    found = {number: again.get(key) for number, key in enumerate(KEYS)}
    assert any(found.values())
    assert all(value in (None, b"%d " % number * 50) for number, value in found.items())
    assert again.close(60)


def test_ram_lets_go_of_what_was_used_longest_ago() -> None:
    ram = Ram(3 * (ENTRY_BYTES + 10))
    for number in range(3):
        assert ram.put(KEYS[number], Entry(b"0123456789", 0))
    assert ram.get(KEYS[0])
    assert ram.put(KEYS[3], Entry(b"0123456789", 0))
    assert [ram.get(key) is not None for key in KEYS[:4]] == [True, False, True, True]
    assert ram.put(KEYS[0], Entry(b"", 0))
    assert (len(ram), ram.held_bytes) == (3, 3 * ENTRY_BYTES + 20)
    assert not ram.put(KEYS[3], Entry(b"v" * 5000, 0))  # and what was there before is not served for it
    assert ram.get(KEYS[3]) is None
    ram.clear()
    assert (len(ram), ram.held_bytes) == (0, 0)


@pytest.mark.slow
def test_entries_cost_no_more_than_they_count_for() -> None:
    """Measured: what an entry really takes beside its value."""
    ram = Ram(1 << 30)
    with traced(__file__) as num_bytes:
        for _ in range(5000):
            ram.put(secrets.token_bytes(32), Entry(secrets.token_bytes(300), time.time()))
        taken_bytes = num_bytes()
    print(taken_bytes // 5000, "bytes each")
    assert 0.5 * ram.held_bytes < taken_bytes <= ram.held_bytes


def test_metrics_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY

    def sample(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"mmcache:{name}", labels) or 0.0

    in_force(monkeypatch, store=str(tmp_path))
    before = [sample("record_hits_total", place="ram"), sample("record_saved_total", place="disk")]
    records.current().put(KEYS[0], b"value")
    records.current().get(KEYS[0])
    assert records.current().flush(LONG_S)
    after = [sample("record_hits_total", place="ram"), sample("record_saved_total", place="disk")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]
    table_sizes.show()
    assert sample("table_bytes", table="records") == ENTRY_BYTES + 5
    assert sample("table_budget_bytes", table="records") == 64 << 20
    assert sample("record_disk_budget_bytes") == 1 << 30
    assert sample("record_disk_bytes") == DiskPlace(tmp_path, 1 << 20).sizes()[1] > 0
