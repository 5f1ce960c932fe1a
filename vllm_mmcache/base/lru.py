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
    """Least recently used goes first. Units: cost_bytes is what one entry counts for, or a function that says it.

    The budget is asked for at every admission, so that settings read later count too.
    """

    def __init__(self, budget: Callable[[], Budget], cost_bytes: int | Callable[[V], int]) -> None:
        self._budget = budget
        self._cost = cost_bytes if callable(cost_bytes) else lambda value: cost_bytes
        self._fixed_cost_bytes = None if callable(cost_bytes) else cost_bytes
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._size_bytes = 0
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
        budget = self._budget()
        with self._lock:
            kept = self._entries.get(key)
            if kept is None:
                self._add(key, value, budget)
                return value
            self._entries.move_to_end(key)
            self._evict(budget)
            return kept

    def replace(self, key: K, value: V) -> V | None:
        """Keep `value` in any case; returns what was kept before. May evict others."""
        budget = self._budget()
        with self._lock:
            former = self._remove(key)
            self._add(key, value, budget)
            return former

    def remove(self, key: K) -> V | None:
        """Forget one; returns what it was."""
        with self._lock:
            return self._remove(key)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes that the entries count for together."""
        return self._size_bytes

    def size(self) -> Size:
        """What it holds, and what it may hold by the budget that ends first."""
        entries, size_bytes = self._budget()
        if self._fixed_cost_bytes is not None:
            size_bytes = min(entries, size_bytes // self._fixed_cost_bytes) * self._fixed_cost_bytes
        return Size(len(self), self._size_bytes, size_bytes)

    def _add(self, key: K, value: V, budget: Budget) -> None:
        """Add an entry that is not there, as the most recently used. One that alone is too much is left out."""
        cost_bytes = self._cost(value)
        if cost_bytes <= budget.size_bytes:
            self._entries[key] = value
            self._size_bytes += cost_bytes
            self._evict(budget)

    def _remove(self, key: K) -> V | None:
        value = self._entries.pop(key, None)
        if value is not None:
            self._size_bytes -= self._cost(value)
        return value

    def _evict(self, budget: Budget) -> None:
        """Let go of what was used longest ago, until the rest fits."""
        while len(self._entries) > budget.entries or self._size_bytes > budget.size_bytes:
            self._remove(next(iter(self._entries)))
