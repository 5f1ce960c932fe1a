# SPDX-License-Identifier: Apache-2.0
"""The records of this process, oldest forgotten first, within two budgets. Any thread.

Knows no vLLM. A record is handed in as what the engine sent and is made when somebody reads it first, so that a
request pays for little more than a place in a table.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable

from vllm_mmcache.bounded import Budget
from vllm_mmcache.observe.schema import Record, Totals

Recipe = Callable[[], Record]


class RecordStore:
    """Records by id and in the order in which they came. A record with an id that is there already replaces it.

    refresh is called before each reading: it may bring records of other processes (see file.py).
    """

    def __init__(self, budget: Callable[[], Budget], refresh: Callable[[], None] = lambda: None) -> None:
        self._budget = budget
        self.refresh = refresh
        self._token = secrets.token_hex(4)
        self._kept: OrderedDict[str, tuple[int, int, Recipe | Record]] = OrderedDict()  # id -> number, bytes, record
        self._number = 0
        self._size_bytes = 0
        self._totals = Totals()
        self._lock = threading.RLock()

    def add(self, record_id: str, size_bytes: int, record: Recipe | Record) -> None:
        """Keep a record, or the recipe of one; may forget the oldest."""
        entries, most_bytes = self._budget()
        with self._lock:
            self._forget(record_id)
            self._number += 1
            self._kept[record_id] = (self._number, size_bytes, record)
            self._size_bytes += size_bytes
            while self._kept and (len(self._kept) > entries or self._size_bytes > most_bytes):
                self._forget(next(iter(self._kept)))

    def count(self, prompt: int, reused: int, missed: dict[str, int], images: dict[str, int]) -> None:
        """Add one request to the totals."""
        with self._lock:
            old = self._totals
            self._totals = Totals(
                requests=old.requests + 1,
                prompt_tokens=old.prompt_tokens + prompt,
                reused_tokens=old.reused_tokens + reused,
                missed_tokens=_sum(old.missed_tokens, missed),
                images=_sum(old.images, images),
            )

    def recent(self, count: int) -> list[Record]:
        """The last `count` records, newest first."""
        self.refresh()
        with self._lock:
            ids = list(self._kept)[-count:] if count > 0 else []
            return [self._read(record_id) for record_id in reversed(ids)]

    def get(self, record_id: str) -> Record | None:
        """One record; None if it is not known, or no longer."""
        self.refresh()
        with self._lock:
            return self._read(record_id) if record_id in self._kept else None

    def since(self, cursor: str = "", count: int = 1000) -> tuple[list[Record], str]:
        """Records that came after `cursor`, oldest first, the last `count` of them, and the cursor to go on from.

        A cursor that is empty or of another process gives all that is kept; a reader drops what it has by id.
        """
        self.refresh()
        token, _, number = cursor.partition("-")
        after = int(number) if token == self._token and number.isdigit() else 0
        with self._lock:
            ids = [record_id for record_id, (number, _, _) in self._kept.items() if number > after][-count:]
            return [self._read(record_id) for record_id in ids], f"{self._token}-{self._number}"

    def totals(self) -> Totals:
        """Sums over all requests since the start."""
        self.refresh()
        return self._totals

    def clear(self) -> None:
        """Forget records and totals."""
        with self._lock:
            self._kept.clear()
            self._size_bytes = 0
            self._totals = Totals()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """What the records count for together."""
        return self._size_bytes

    def _read(self, record_id: str) -> Record:
        number, size_bytes, record = self._kept[record_id]
        if not isinstance(record, Record):
            record = record()
            self._kept[record_id] = (number, size_bytes, record)
        return record

    def _forget(self, record_id: str) -> None:
        if record_id in self._kept:
            _, size_bytes, _ = self._kept.pop(record_id)
            self._size_bytes -= size_bytes


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}
