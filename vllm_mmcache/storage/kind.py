# SPDX-License-Identifier: Apache-2.0
"""Kinds of content: features, records, and whatever else will be stored. Any process.

A kind says where its entries lie, what they are called in log lines, and which metrics count them. A component makes
one for itself and opens its tiers with it (open.py); the storage knows no kind by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_mmcache.metrics.counters import Gauge, LabelledCounter


@dataclass(frozen=True)
class Kind:
    """One kind of content that is stored."""

    name: str
    """Its folder in a store's directory, and a part of its names in Redis or Valkey."""
    format: int
    """In the names in Redis or Valkey: raise it when the bytes of the entries change."""
    said: str
    """What log lines call it, with `{}` for the place."""
    counters: Mapping[str, LabelledCounter]
    """By the names that TierCounts.add takes; a name that is not here is not counted."""
    rejected: str
    """The name among `counters` of entries that were damaged."""
    disk_budget: str
    """The setting with the bytes that it may take in the store's directory; 0 for none."""
    is_small: bool = False
    """Whether an entry has some hundred bytes: many of them go into one SQLite file, larger ones into a file each."""
    suffix: str = ".bin"
    """Ending of the names of files."""
    held_gauge: Gauge | None = None
    budget_gauge: Gauge | None = None
    """Where the bytes in use on disk are shown, and those that may be used."""

    @property
    def remote_prefix(self) -> str:
        """What the names of its entries begin with in Redis or Valkey; their key follows, in base 16."""
        return f"mmcache:{self.name}:{self.format}:"

    @property
    def remote_pattern(self) -> str:
        """What all its names match, also those of other formats."""
        return f"mmcache:{self.name}:*"
