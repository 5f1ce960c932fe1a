# SPDX-License-Identifier: Apache-2.0
"""The store and the record file: bounds, cursors, listeners, and what is no record."""

import json
import resource
from pathlib import Path
from typing import get_args

import pytest

from vllm_mmcache.base.lru import Budget
from vllm_mmcache.components.observe.record.file import RecordFile, before, read_records
from vllm_mmcache.components.observe.record.schema import (
    FEATURE_MEANINGS,
    MEANINGS,
    Image,
    Reason,
    Record,
    from_json,
    to_json,
)
from vllm_mmcache.components.observe.record.store import RecordStore

EXAMPLES = [
    from_json(data) for data in json.loads((Path(__file__).parents[4] / "support" / "example_records.json").read_text())
]


def record(name: str) -> Record:
    return EXAMPLES[0].model_copy(update={"id": name})


def store(entries: int = 100, size_bytes: int = 10_000) -> RecordStore:
    return RecordStore(lambda: Budget(entries, size_bytes))


def test_the_examples_are_whole_and_show_every_reason() -> None:
    from tests.support.observing import assert_whole

    assert {miss.reason for example in EXAMPLES for miss in example.misses} == set(Reason) == set(MEANINGS)
    for example in EXAMPLES:
        assert_whole(example)
        assert from_json(json.loads(json.dumps(to_json(example)))) == example


def test_every_place_of_features_has_a_meaning() -> None:
    assert set(FEATURE_MEANINGS) == set(get_args(Image.model_fields["features"].annotation))


def test_another_format_is_refused() -> None:
    assert from_json({**to_json(EXAMPLES[0]), "later": 1}) == EXAMPLES[0], "a field that is not known is no matter"
    with pytest.raises(ValueError, match="format"):
        from_json({**to_json(EXAMPLES[0]), "format": 2})


def test_bounds_by_count_and_bytes() -> None:
    records = store(entries=3)
    for number in range(5):
        records.add(f"r{number}", 10, record(f"r{number}"))
    assert [r.id for r in records.recent(9)] == ["r4", "r3", "r2"]
    records = store(size_bytes=100)
    for number in range(5):
        records.add(f"r{number}", 40, record(f"r{number}"))
    assert (len(records), records.size_bytes) == (2, 80)
    assert records.get("r0") is None


def test_a_record_is_made_when_it_is_read() -> None:
    records, made = store(), []

    def recipe() -> Record:
        made.append(1)
        return record("r")

    records.add("r", 10, recipe)
    assert not made
    assert records.get("r") is records.get("r") is not None
    assert len(made) == 1


def test_a_record_that_can_not_be_made_hides_no_other() -> None:
    records = store()

    def fail() -> Record:
        raise KeyError("kind")

    for name in "abc":
        records.add(name, 10, fail if name == "b" else record(name))
    assert [one.id for one in records.recent(9)] == ["c", "a"]
    assert records.get("b") is None
    assert records.size_bytes == 20
    records.add("d", 10, fail)
    assert records.named("d") == []
    assert [one.id for one in records.since()[0]] == ["a", "c"]


def test_cursors() -> None:
    records = store()
    records.add("a", 1, record("a"))
    found, cursor = records.since()
    assert [r.id for r in found] == ["a"]
    records.add("b", 1, record("b"))
    assert [r.id for r in records.since(cursor)[0]] == ["b"]
    assert records.since(records.since(cursor)[1])[0] == []
    assert len(records.since("0123abcd-5")[0]) == 2, "of another process"
    for text in (
        "x",
        "of-another-process",
        cursor + " ",
        cursor + "\n",
        cursor[:9] + "\u00b2",
        cursor[:9] + "9" * 5000,
    ):
        with pytest.raises(ValueError, match="is no cursor"):
            records.since(text)


def test_a_request_that_has_the_id_of_another_replaces_nothing() -> None:
    records = store()
    for name in ("a", "b", "c"):
        records.add(name, 1, record(name), request_id="a" if name != "c" else "\u00e9" * 500)
    assert [r.id for r in records.named("a")] == ["a"], "a record's own id is found first"
    records.add("a", 1, record("another"))
    assert [r.id for r in records.recent(9)] == ["c", "b", "a"]
    records.add("d", 1, record("d"), request_id="x")
    records.add("e", 1, record("e"), request_id="x")
    assert [r.id for r in records.named("x")] == ["e", "d"]
    assert [r.id for r in records.named("x", 1)] == ["e"]
    assert records.named("none") == []


def test_a_file_is_bounded_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    line = len(json.dumps(to_json(EXAMPLES[0])))
    file = RecordFile(path, lambda: 10 * line)
    for number in range(50):
        file.hand(lambda number=number: record(f"r{number}"))  # type: ignore[misc]
    file.flush()
    kept = list(read_records(path))
    assert kept[-1].id == "r49"
    assert 3 < len(kept) < 12
    assert path.stat().st_size + before(path).stat().st_size < 12 * line
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_lines_that_are_no_records_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path, lambda: 1 << 20)
    file.write(record("a"))
    with path.open("a") as lines:
        lines.write('{"id": "to\n{}\n')
    file.write(record("b"))
    assert [r.id for r in read_records(path)] == ["a", "b"]
    assert "records.jsonl, line 2: not a record" in caplog.text
    assert "left out are 2 such lines" in caplog.text


def test_a_file_without_a_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("\n{}\n")
    with pytest.raises(ValueError, match=r"records.jsonl, line 1: not a record"):
        list(read_records(path))


def test_half_a_line_is_taken_back_and_counts_as_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = RecordFile(tmp_path / "records.jsonl", lambda: 1 << 20)
    file.write(record("a"))
    whole = file.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, limits[1]))  # as a quota does, or a full disk
    try:
        file.hand(lambda: record("b"))
        file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.dropped == 1
    assert f"100 of {len(whole)} bytes could be written" in caplog.text
    assert file.path.read_bytes() == whole
    file.write(record("c"))
    assert [r.id for r in read_records(file.path)] == ["a", "c"]


def test_a_disk_that_fails_costs_records_only(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "none" / "records.jsonl", lambda: 1 << 20)
    file.hand(lambda: EXAMPLES[0])
    file.flush()
    assert file.dropped == 1
