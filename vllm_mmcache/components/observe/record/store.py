# SPDX-License-Identifier: Apache-2.0
"""The records of this process, oldest forgotten first, within two budgets. Any thread.

Knows no vLLM. A record is handed in as what the engine sent and is made when somebody reads it first, so that a
request pays for little more than a place in a table.
"""

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, Size
from vllm_mmcache.components.observe.record.schema import REQUEST_ID_CHARS, Record, Totals

Recipe = Callable[[], Record]
"""Makes a record of what the API server and the engine noted; called when somebody reads the record first."""
_CURSOR = re.compile("[0-9a-f]{8}-[0-9]{1,18}")


@dataclass(slots=True)
class _Kept:
    number: int
    size_bytes: int
    record: Recipe | Record
    request_id: str


class RecordStore:
    """Records by their own ids, in the order in which they came, and by those that clients gave their requests.

    refresh is called before each reading: it may bring records of other processes (see file.py).
    """

    def __init__(self, budget: Callable[[], Budget], refresh: Callable[[], None] = lambda: None) -> None:
        self._budget = budget
        self.refresh = refresh
        self._token = secrets.token_hex(4)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._number = 0
        self._size_bytes = 0
        self._totals = Totals()
        self._lock = threading.RLock()

    def add(self, record_id: str, size_bytes: int, record: Recipe | Record, request_id: str = "") -> None:
        """Keep a record, or the recipe of one; may forget the oldest. An id that is there already is left as it is."""
        entries, most_bytes = self._budget()
        with self._lock:
            if record_id in self._kept:
                return
            self._number += 1
            self._kept[record_id] = _Kept(self._number, size_bytes, record, request_id)
            self._size_bytes += size_bytes
            while self._kept and (len(self._kept) > entries or self._size_bytes > most_bytes):
                self._forget(next(iter(self._kept)))

    def count(self, prompt: int, reused: int, missed: dict[str, int], images: dict[str, int]) -> None:
        """Add one request to the totals.

        Units: prompt, reused and missed, by reason, in tokens; images in number, by where their features came from.
        """
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
            return self._readable(reversed(ids))

    def get(self, record_id: str) -> Record | None:
        """One record; None if it is not known, or no longer."""
        self.refresh()
        with self._lock:
            return self._read(record_id) if record_id in self._kept else None

    def named(self, name: str, count: int = 1000) -> list[Record]:
        """The record of that id; or else those whose requests carry it, newest first, since a client may choose it."""
        self.refresh()
        with self._lock:
            if name in self._kept:
                return self._readable([name])
            carried = name[:REQUEST_ID_CHARS]
            ids = [record_id for record_id, kept in self._kept.items() if kept.request_id == carried]
            return self._readable(reversed(ids[-count:]))

    def since(self, cursor: str = "", count: int = 1000) -> tuple[list[Record], str]:
        """Records that came after `cursor`, oldest first, the last `count` of them, and the cursor to go on from.

        A cursor that is empty or of another process gives all that is kept; a reader drops what it has by id.
        Raises: ValueError for what is no cursor.
        """
        if cursor and not _CURSOR.fullmatch(cursor):
            raise ValueError(f"{cursor[:40]!r} is no cursor: expected what an earlier answer gave")
        self.refresh()
        token, _, number = cursor.partition("-")
        after = int(number) if token == self._token else 0
        with self._lock:
            ids = [record_id for record_id, kept in self._kept.items() if kept.number > after][-count:]
            return self._readable(ids), f"{self._token}-{self._number}"

    def totals(self) -> Totals:
        """Sums over the requests counted since this process started: its own, and those that `refresh` brought."""
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
        """Bytes that the records count for together, as `add` was told."""
        return self._size_bytes

    def size(self) -> Size:
        """What there is, and what there may be."""
        return Size(len(self), self._size_bytes, self._budget().size_bytes)

    def _readable(self, record_ids: Iterable[str]) -> list[Record]:
        return [record for record in map(self._read, list(record_ids)) if record is not None]

    def _read(self, record_id: str) -> Record | None:
        """A record; None, and it is gone, for one that a bug of ours makes unreadable: the others are shown."""
        kept = self._kept[record_id]
        if not isinstance(kept.record, Record):
            with failsafe("observe"):
                kept.record = kept.record()
        if isinstance(kept.record, Record):
            return kept.record
        self._forget(record_id)
        return None

    def _forget(self, record_id: str) -> None:
        if record_id in self._kept:
            self._size_bytes -= self._kept.pop(record_id).size_bytes


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}
