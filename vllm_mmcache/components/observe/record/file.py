# SPDX-License-Identifier: Apache-2.0
"""Records in a file, one JSON object a line, which several API servers write together. Bounded by turning it over.

A thread writes, so that no request waits for a disk. When the file has half of its budget, it becomes `<name>.1` and a
new one is begun. Each line is written whole, under a lock. Readers: `mmcache explain`, and the other API servers.
"""

import contextlib
import fcntl
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_mmcache.components.observe.record.schema import Record, from_json, to_json
from vllm_mmcache.metrics import counters

logger = logging.getLogger("vllm.mmcache")

QUEUE_RECORDS = 4096


class RecordFile:
    """Appends records to `path`. Units: budget_bytes bounds the file and the one before it together."""

    def __init__(self, path: Path, budget_bytes: Callable[[], int]) -> None:
        self.path = path
        self._budget = budget_bytes
        self._queue: queue.Queue[Callable[[], Record]] = queue.Queue(QUEUE_RECORDS)
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def hand(self, record: Callable[[], Record]) -> None:
        """Have a record written soon; dropped, and counted, when the writer is far behind."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="mmcache-records", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._drop()

    def flush(self) -> None:
        """Wait until all that was handed in is written or given up."""
        self._queue.join()

    def write(self, record: Record) -> None:
        """Append one line. Raises: OSError."""
        line = json.dumps(to_json(record), separators=(",", ":")).encode() + b"\n"
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                size_bytes = os.fstat(file).st_size
                if (written := os.write(file, line)) < len(line):  # or the next line would be written behind half a one
                    os.ftruncate(file, size_bytes)
                    raise OSError(f"{written} of {len(line)} bytes could be written: make room, or raise its limit")
                is_full = size_bytes + written >= self._budget() // 2
            finally:
                os.close(file)
            if is_full:
                os.replace(self.path, before(self.path))
        finally:
            os.close(lock)

    def _drop(self) -> None:
        self.dropped += 1
        counters.OBSERVED_DROPPED.add()

    def _write_all(self) -> None:
        failed = False
        while True:
            record = self._queue.get()
            try:
                self.write(record())
                failed = False
            except Exception as error:
                self._drop()
                if not failed:
                    logger.warning("mmcache: records are not written to %s: %s", self.path, error)
                failed = True
            finally:
                self._queue.task_done()


def before(path: Path) -> Path:
    """The file that was turned over last."""
    return path.parent / f"{path.name}.1"


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file and of the one before it, oldest first.

    Lines that are no records, such as half a one, are left out, and a warning says how many. Raises: OSError;
    ValueError, which names the first such line and what is wrong with it, where there is no record at all.
    """
    num_records = num_left_out = 0
    first = ""
    for file in [file for file in (before(path), path) if file.exists()] or [path]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = from_json(json.loads(line))
                except ValueError as error:
                    first = first or f"{file}, line {number}: not a record ({str(error).splitlines()[0]})"
                    num_left_out += 1
                    continue
                num_records += 1
                yield record
    if num_left_out and not num_records:
        raise ValueError(first)
    if num_left_out:
        logger.warning("mmcache: %s; left out are %d such lines", first, num_left_out)


class Follower:
    """Reads what has been appended to a record file since the last reading, also when it was turned over once since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._offset = 0
        self._lock = threading.Lock()

    def read_new(self) -> list[Record]:
        """New records, oldest first; lines that are not whole yet or no records are left out."""
        with self._lock:
            records: list[Record] = []
            with contextlib.suppress(OSError):
                inode = os.stat(self.path).st_ino
                if self._inode != inode:
                    records += self._read(before(self.path), self._inode, or_whole=True)
                    self._inode, self._offset = inode, 0
                records += self._read(self.path, inode, or_whole=False)
            return records

    def _read(self, path: Path, inode: int, or_whole: bool) -> list[Record]:
        """What is new in the file of that inode; of another file all, or nothing."""
        records = []
        with contextlib.suppress(OSError), path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != inode:
                if not or_whole:
                    return []
                self._offset = 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with contextlib.suppress(ValueError):
                    records.append(from_json(json.loads(line)))
        return records
