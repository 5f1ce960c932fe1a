# SPDX-License-Identifier: Apache-2.0
"""Sizes of tables: which there are, that they say what is there, and how they come to /metrics."""

import gc
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from pydantic import ByteSize

from tests.support.packages import file_tier
from tests.support.tiers import record_tier
from vllm_mmcache.base import status
from vllm_mmcache.base.lru import Budget, LruTable, Size
from vllm_mmcache.metrics import table_sizes
from vllm_mmcache.storage.record_store import MOST_WAITING_BYTES, RecordStore
from vllm_mmcache.storage.write_behind import WriteBehind


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"mmcache:{name}", labels)


@pytest.fixture
def metrics_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(status._is_on, "metrics", True)
    monkeypatch.setattr(table_sizes, "_engine", {})
    monkeypatch.setattr(table_sizes, "_sent", {})
    monkeypatch.setattr(table_sizes, "ENGINE_SECONDS", 0.0)


def test_a_bounded_table_says_what_it_holds_and_which_of_its_budgets_counts() -> None:
    table: LruTable[int, int] = LruTable(lambda: Budget(65536, 64 << 20), 6144)
    for number in range(20000):
        table.admit(number, number)
    assert table.size() == Size(10922, 10922 * 6144, 10922 * 6144)
    by_entries: LruTable[int, int] = LruTable(lambda: Budget(3, 64 << 20), 100)
    by_entries.admit(1, 1)
    assert by_entries.size() == Size(1, 100, 300)


def test_a_server_shows_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    table: LruTable[int, int] = LruTable(lambda: Budget(10, 1 << 20), 100)
    monkeypatch.setattr(table_sizes, "_server", {})
    table_sizes.of_server("test", table.size)
    for number in range(12):
        table.admit(number, number)
    table_sizes.show()
    assert sample("table_entries", table="test") == 10
    assert sample("table_bytes", table="test") == sample("table_budget_bytes", table="test") == 1000
    table_sizes.of_server("unbounded", lambda: Size(4))
    table_sizes.show()
    assert sample("table_entries", table="unbounded") == 4
    assert sample("table_budget_bytes", table="unbounded") is None


def test_a_table_that_is_gone_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's memory must not stay for a gauge."""
    monkeypatch.setattr(table_sizes, "_server", {})
    table: LruTable[int, int] = LruTable(lambda: Budget(10, 1 << 20), 100)
    table_sizes.of_server("test", table.size)
    assert len(list(table_sizes._look(table_sizes._server))) == 1
    del table
    gc.collect()
    assert list(table_sizes._look(table_sizes._server)) == []


def test_the_thread_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(BaseException):
        pass

    asked = []

    ours = threading.get_ident()  # another test may have started the thread itself, which goes on as it did

    def measure() -> Size:
        if threading.get_ident() == ours:
            asked.append(1)
        raise OSError

    def sleep(seconds: float) -> None:
        if threading.get_ident() != ours:
            time.sleep(seconds)
        elif len(asked) == 3:
            raise Enough

    monkeypatch.setattr(table_sizes, "_server", {"bad": lambda: measure})
    monkeypatch.setattr(table_sizes, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with pytest.raises(Enough):
        table_sizes._show_forever()
    assert len(asked) == 3


@pytest.mark.usefixtures("metrics_are_on")
def test_an_engine_sends_what_has_changed() -> None:
    from vllm.v1.serial_utils import MsgpackEncoder

    now = [Size(1, 10, 100)]
    table_sizes.of_engine("test", lambda: now[0])
    assert table_sizes.take_changed() == {"size/test/entries": 1, "size/test/bytes": 10, "size/test/budget_bytes": 100}
    assert table_sizes.take_changed() == {}
    now[0] = Size(2, 10, 100)
    assert table_sizes.take_changed() == {"size/test/entries": 2}
    now[0] = Size(2, 10, ByteSize(200))  # as settings have them; such a one would end the thread that sends
    assert MsgpackEncoder().encode(table_sizes.take_changed())
    with pytest.raises(TypeError):
        MsgpackEncoder().encode({"size": ByteSize(200)})


@pytest.mark.usefixtures("metrics_are_on")
def test_an_engine_looks_seldom_and_not_where_metrics_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    table_sizes.of_engine("test", lambda: Size(len(asked)) if asked.append(1) is None else Size(0))
    assert table_sizes.take_changed()
    monkeypatch.setattr(table_sizes, "ENGINE_SECONDS", 3600.0)
    assert [table_sizes.take_changed() for _ in range(100)] == [{}] * 100
    assert len(asked) == 1
    monkeypatch.setattr(table_sizes, "ENGINE_SECONDS", 0.0)
    monkeypatch.setitem(status._is_on, "metrics", False)
    assert (table_sizes.take_changed(), len(asked)) == ({}, 1)


def test_what_an_engine_sends_is_shown_by_engine() -> None:
    table_sizes.show_changed("size/test/bytes", 7, 3)
    assert sample("engine_table_bytes", table="test", engine="3") == 7
    table_sizes.show_changed("size/test/of_a_newer_engine", 7, 3)


def test_tables_of_the_engine(tmp_path: Path) -> None:
    """What vLLM's scheduler has is in a process of its own; these are what it makes there."""
    from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES, RamTier
    from vllm_mmcache.components.image_checkpoints.backoff import Backoff, TrackedCheckpoints
    from vllm_mmcache.components.image_checkpoints.positions import Checkpoint
    from vllm_mmcache.components.observe.record.history import History

    ram = RamTier(4 * ALIGN_BYTES)
    ram.reserve("a", ALIGN_BYTES + 1)
    assert ram.size() == Size(1, 2 * ALIGN_BYTES, 4 * ALIGN_BYTES)
    disk = file_tier(tmp_path, 1 << 20)
    disk.counts.hold(77)
    writer = WriteBehind[bytes, int](disk, lambda items: None, budget=Budget(9, 9), batch=Budget(1, 1))
    writer._waiting |= {b"a": 1, b"b": 2}
    assert writer.size() == Size(2)
    assert disk.size() == Size(None, 77, 1 << 20)
    assert History(16, lambda: 1 << 20).size() == Size(0, 0, 1 << 20)
    live = TrackedCheckpoints(Backoff())
    live.add(b"key", Checkpoint(16, frozenset({"end"})))
    assert live.size() == Size(1)


def test_what_the_file_of_observed_requests_drops_is_counted(tmp_path: Path) -> None:
    from vllm_mmcache.components.observe.record.file import RecordFile
    from vllm_mmcache.components.observe.record.schema import Record

    def fails() -> Record:
        raise OSError("no room")

    before = sample("observed_dropped_total") or 0.0
    file = RecordFile(tmp_path / "records", lambda: 1 << 20)
    file.hand(fails)
    file.flush()
    assert sample("observed_dropped_total") == before + file.dropped == before + 1


def test_what_waits_to_be_written_is_a_table(tmp_path: Path) -> None:
    store = RecordStore(1 << 20, [record_tier(tmp_path)])
    assert store.waiting() == Size(0, 0, MOST_WAITING_BYTES)
    (writer,) = store._writers
    writer._waiting, writer._waiting_bytes = {b"key": b"value"}, 5
    assert store.waiting() == Size(1, 5, MOST_WAITING_BYTES)
