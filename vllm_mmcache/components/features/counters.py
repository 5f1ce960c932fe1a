# SPDX-License-Identifier: Apache-2.0
"""What each tier of the store counts, for /metrics and for tests. Any thread of one process; plain numbers."""

import threading
from dataclasses import asdict, dataclass, field

from vllm_mmcache.metrics import counters


@dataclass
class Counts:
    """The counts of one tier since the process started; `held_bytes` is what it holds, as this process last saw."""

    hits: int = 0
    misses: int = 0
    saved: int = 0
    read_bytes: int = 0
    saved_bytes: int = 0
    evictions: int = 0
    errors: int = 0
    """Reads and writes that the tier could not do: full, read-only, unreachable, too slow."""
    set_aside: int = 0
    """Packages that were no whole package of ours; each is a miss too."""
    dropped: int = 0
    """Packages not written: too large, or the writer was behind."""
    load_s: float = 0.0
    save_s: float = 0.0
    not_asked: int = 0
    """Packages that the tier was not asked for, since the tower is faster; see engine/cost_model.py."""
    expected_load_s: float = 0.0
    expected_tower_s: float = 0.0
    """Both estimates, added up over the decisions that were made with both known."""
    held_bytes: int = 0


@dataclass
class Counters:
    """Counts of one tier that several threads add to; what is added goes to /metrics, too, under the tier's name."""

    tier: str
    _counts: Counts = field(default_factory=Counts)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **amounts: float) -> None:
        """Add to counts by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)
        for name, amount in amounts.items():
            counters.TIER_COUNTERS[name].add(amount, self.tier)

    def hold(self, num_bytes: int) -> None:
        """Say what the tier holds now."""
        with self._lock:
            self._counts.held_bytes = num_bytes

    def snapshot(self) -> dict[str, float]:
        """All counts by name, of one moment."""
        with self._lock:
            return asdict(self._counts)
