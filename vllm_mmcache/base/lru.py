# SPDX-License-Identifier: Apache-2.0
"""A table with two budgets, entries and bytes, that lets go of what was used longest ago. Any process, any thread.

It knows nothing of what it holds; the caller says what an entry costs. It must never grow past a budget.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Budget(NamedTuple):
    """What a table may hold."""

    entries: int
    size_bytes: int


class Size(NamedTuple):
    """A table now. Units: bytes of memory or disk; None where it is not counted, or has no bound of its own."""

    entries: int | None = None
    bytes: int | None = None
    budget_bytes: int | None = None


class LruTable(Generic[K, V]):
    """Least recently used goes first. Units: cost_bytes is what one entry counts for.

    The budget is asked for at every admission, so that settings read later count too.
    """

    def __init__(self, budget: Callable[[], Budget], cost_bytes: int) -> None:
        self._budget = budget
        self._cost_bytes = cost_bytes
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value, which is now the most recently used; None where it is not known."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def admit(self, key: K, value: V) -> V:
        """Keep `value` unless the key is known already; returns what is kept. May evict others."""
        limit = self._limit()
        with self._lock:
            kept = self._entries.setdefault(key, value)
            self._settle(key, limit)
            return kept

    def replace(self, key: K, value: V) -> V | None:
        """Keep `value` in any case; returns what was kept before. May evict others."""
        limit = self._limit()
        with self._lock:
            former = self._entries.get(key)
            self._entries[key] = value
            self._settle(key, limit)
            return former

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def _limit(self) -> int:
        entries, size_bytes = self._budget()
        return min(entries, size_bytes // self._cost_bytes)

    def _settle(self, key: K, limit: int) -> None:
        """`key` is the most recently used; what is too much goes."""
        self._entries.move_to_end(key)
        while len(self._entries) > limit:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes that the entries count for together."""
        return len(self._entries) * self._cost_bytes

    def size(self) -> Size:
        """What it holds, and what it may hold by the budget that ends first."""
        return Size(len(self), self.size_bytes, self._limit() * self._cost_bytes)
