# SPDX-License-Identifier: Apache-2.0
"""What each tier counts, for /metrics and for tests. Any thread of one process; plain numbers."""

import threading

from vllm_mmcache.storage.kind import Kind


class TierCounts:
    """The counts of one tier of one kind since it was opened; what is added goes to /metrics, too."""

    def __init__(self, kind: Kind, tier: str) -> None:
        self.tier = tier
        self.held_bytes = 0
        """What the tier holds, as this process last saw."""
        self._kind = kind
        self._totals: dict[str, float] = dict.fromkeys(kind.counters, 0)
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to counts by name; the names are those of the kind's counters, and others are left out."""
        totals = self._totals
        for name, amount in amounts.items():
            if amount and name in totals:
                with self._lock:
                    totals[name] += amount
                self._kind.counters[name].add(amount, self.tier)

    def hold(self, num_bytes: int, budget_bytes: int | None = None) -> None:
        """Say what the tier holds now, and what it may."""
        self.held_bytes = num_bytes
        if self._kind.held_gauge is not None:
            self._kind.held_gauge.show(num_bytes)
        if self._kind.budget_gauge is not None and budget_bytes is not None:
            self._kind.budget_gauge.show(budget_bytes)

    def snapshot(self) -> dict[str, float]:
        """All sums by name, and what the tier holds, of one moment."""
        with self._lock:
            return {**self._totals, "held_bytes": self.held_bytes}
