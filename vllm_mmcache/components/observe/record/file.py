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
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO

from vllm_mmcache.components.observe.record.schema import Record, from_json, to_json
from vllm_mmcache.metrics import counters

logger = logging.getLogger("vllm.mmcache")

QUEUE_RECORDS = 4096
FOLLOWED_BYTES = 64 << 20  # how far before its end a file is followed from
BATCH_RECORDS = 100
_HEAD_BYTES = 64
_Which = tuple[int, bytes]
"""A file: its inode, which another one may have later, and the head of its first line, which has a record's id."""


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
    """Reads what has been appended to a record file since the last reading, also when it was turned over once since.

    What lies more than `most_bytes` before the end, of the file and the one before it together, is not read at first,
    and no reading holds more than BATCH_RECORDS records, however large the files are. One thread at a time.
    """

    def __init__(self, path: Path, most_bytes: int = FOLLOWED_BYTES) -> None:
        self.path = path
        self.num_left_out = 0
        """How many of the lines read so far are no records."""
        self._most_bytes = most_bytes
        self._file: _Which | None = None  # that was read last
        self._offset = 0

    def read_new(self) -> list[Record]:
        """The next of the new records, oldest first; none where nothing is new.

        Lines that are no records are left out, and one that is not whole yet is read when it is.
        """
        records: list[Record] = []
        with contextlib.suppress(OSError), contextlib.closing(self._new_lines()) as lines:
            for line in lines:
                try:
                    records.append(from_json(json.loads(line)))
                except ValueError:
                    self.num_left_out += 1
                if len(records) == BATCH_RECORDS:
                    break
        return records

    def _new_lines(self) -> Generator[bytes, None, None]:
        with contextlib.ExitStack() as stack:
            files = self._opened(stack)
            if self._file is None:
                self._begin(files)
            for which, file in files:
                if self._file != which:
                    self._file, self._offset = which, 0
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    yield line

    def _opened(self, stack: contextlib.ExitStack) -> list[tuple[_Which, BinaryIO]]:
        """The files that may have something new, oldest first. One in which no line has begun yet is left out."""
        files: list[tuple[_Which, BinaryIO]] = []
        for path in (self.path, before(self.path)):  # in this order, since the first may become the second meanwhile
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(path.open("rb"))
                head = file.readline(_HEAD_BYTES)
                if len(head) < _HEAD_BYTES and not head.endswith(b"\n"):
                    continue
                which = (os.fstat(file.fileno()).st_ino, head)
                files.insert(0, (which, file))
                if which == self._file:
                    break
        return files

    def _begin(self, files: list[tuple[_Which, BinaryIO]]) -> None:
        """Pass over what is too far before the end: takes files out, and sets where in the first of the others it is.

        A line of which a part is too far is passed over as a whole.
        """
        over_bytes = sum(os.fstat(file.fileno()).st_size for _, file in files) - self._most_bytes
        while files and over_bytes > 0:
            which, file = files[0]
            size_bytes = os.fstat(file.fileno()).st_size
            if over_bytes < size_bytes:
                file.seek(over_bytes - 1)
                file.readline()
                self._file, self._offset = which, file.tell()
                return
            over_bytes -= size_bytes
            del files[0]
