# SPDX-License-Identifier: Apache-2.0
"""One record file, several processes that write it, and one that follows."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.components.observe.record.test_store import record
from vllm_mmcache.components.observe.record.file import Follower, RecordFile, before


def write_many(path: Path, name: str) -> None:
    file = RecordFile(path, lambda: 120_000)
    for number in range(30):
        file.write(record(f"{name}{number}"))


@pytest.mark.process
def test_several_writers_and_a_follower(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    follower, seen = Follower(path), []
    assert follower.read_new() == []
    writers: list[Any] = [multiprocessing.get_context("fork").Process(target=write_many, args=(path, n)) for n in "ab"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen += [r.id for r in follower.read_new()]
    seen += [r.id for r in follower.read_new()]
    assert len(seen) == len(set(seen))
    assert set(seen) == {f"{name}{number}" for name in "ab" for number in range(30)}
    assert before(path).exists(), "turned over between"
