# SPDX-License-Identifier: Apache-2.0
"""What follows a record file: where it begins, how much it holds, and files that turn over meanwhile."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_app import many
from vllm_mmcache.components.observe.record.file import BATCH_RECORDS, Follower, RecordFile, before
from vllm_mmcache.components.observe.record.schema import Record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def write(path: Path, records: Sequence[Record], turn_over: bool = False) -> int:
    """Append records, and let the file become the one before if asked. Returns the bytes of the last line."""
    file = RecordFile(path, lambda: 1 << 40)
    for record in records:
        file.write(record)
    size_bytes = len(path.read_bytes().splitlines(keepends=True)[-1])
    if turn_over:
        os.replace(path, before(path))
    return size_bytes


def ids(records: Sequence[Record]) -> list[str]:
    return [record.id for record in records]


def all_new(follower: Follower) -> list[str]:
    return [record.id for records in iter(follower.read_new, []) for record in records]


def test_many_records_come_in_batches(path: Path) -> None:
    records = many(2 * BATCH_RECORDS + 50)
    write(path, records[: BATCH_RECORDS + 20], turn_over=True)
    write(path, records[BATCH_RECORDS + 20 :])
    follower = Follower(path)
    assert ids(follower.read_new()) == ids(records[:BATCH_RECORDS])
    assert ids(follower.read_new()) == ids(records[BATCH_RECORDS : 2 * BATCH_RECORDS])
    assert ids(follower.read_new()) == ids(records[2 * BATCH_RECORDS :])
    assert follower.read_new() == []


def test_lines_that_are_no_records_end_no_batch(path: Path) -> None:
    path.write_text("{}\n" * (BATCH_RECORDS + 1))
    records = many(2)
    write(path, records)
    with path.open("a") as lines:
        lines.write("{")
    follower = Follower(path)
    assert ids(follower.read_new()) == ids(records)
    assert follower.num_left_out == BATCH_RECORDS + 1
    assert follower.read_new() == []


@pytest.mark.parametrize("turned_over", [0, 3, 7, 10])
def test_it_begins_so_many_bytes_before_the_end(path: Path, turned_over: int) -> None:
    """Of both files together, and at the beginning of a line."""
    (example,) = many(1)
    records = [example.model_copy(update={"id": f"5f3a91c2-{n}"}) for n in range(10)]  # in lines of one length
    line = 0
    if turned_over:
        line = write(path, records[:turned_over], turn_over=True)
    if turned_over < 10:
        line = write(path, records[turned_over:])
    for most_bytes, num in ((4 * line, 4), (4 * line + 1, 4), (5 * line - 1, 4), (line - 1, 0), (99 * line, 10)):
        follower = Follower(path, most_bytes)
        assert all_new(follower) == ids(records[10 - num :])
    later = many(3)
    write(path, later)
    assert all_new(follower) == ids(later), "only a first reading leaves out what is far before the end"


def test_a_file_that_turns_over(path: Path) -> None:
    records = many(9)
    follower = Follower(path)
    assert follower.read_new() == []
    write(path, records[:2])
    assert all_new(follower) == ids(records[:2])
    write(path, records[2:4], turn_over=True)
    assert all_new(follower) == ids(records[2:4]), "there is no file until the next record"
    write(path, records[4:6], turn_over=True)
    write(path, records[6:8])
    assert all_new(follower) == ids(records[4:8])
    path.touch()
    write(path, records[8:])
    assert all_new(follower) == ids(records[8:])


def test_a_new_file_in_the_place_of_one_that_is_gone(path: Path) -> None:
    """A file system gives the inode of a file that is gone to one that is made next."""
    records = many(6)
    write(path, records[:2])
    follower = Follower(path)
    assert all_new(follower) == ids(records[:2])
    path.write_bytes(b"")
    assert all_new(follower) == []
    write(path, records[2:])
    assert all_new(follower) == ids(records[2:])


def test_a_file_that_turns_over_while_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = many(8)
    write(path, records[:2], turn_over=True)
    write(path, records[2:4])
    follower = Follower(path)
    assert all_new(follower) == ids(records[:4])
    write(path, records[4:5], turn_over=True)
    write(path, records[5:6])
    opens = Path.open

    def turns_over(self: Path, *args: Any) -> Any:
        opened = opens(self, *args)
        if self == path and args == ("rb",):
            monkeypatch.undo()
            write(path, records[6:7], turn_over=True)
            write(path, records[7:])
        return opened

    monkeypatch.setattr(Path, "open", turns_over)
    assert all_new(follower) == ids(records[5:]), "each once; the file before is gone with what was new in it"
