# SPDX-License-Identifier: Apache-2.0
"""Loads and saves from several threads while nodes go and come: what was found, what was wrong, how long it took."""

import itertools
import threading
import time
from dataclasses import dataclass, field

from tests.support.packages import features, load, save
from vllm_mmcache.storage.tier import Tier

NUM_THREADS = 4
NUM_PACKAGES = 60


@dataclass
class Load:
    """Of all threads since the last `mark`; the whole is in `total`."""

    tier: Tier
    hits: int = 0
    misses: int = 0
    wrong: int = 0
    longest_s: float = 0.0
    hit_at: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        for number in range(NUM_PACKAGES):
            save(self.tier, number)
        self._threads = [threading.Thread(target=self._work, args=(start,)) for start in range(NUM_THREADS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def gap_after(self, moment: float) -> float:
        """Seconds without a hit: the longest time between two hits that are next to each other, after `moment`."""
        times = [moment, *(at for at in self.hit_at if at > moment)]
        return max((later - before for before, later in itertools.pairwise(times)), default=float("inf"))

    def said(self, moment: float, all_names_s: float) -> str:
        """The figures on one line."""
        return (
            f"{self.hits} hits, {self.misses} misses, {self.wrong} wrong, longest load {self.longest_s * 1000:.0f} ms, "
            f"longest time without a hit {self.gap_after(moment):.1f} s, every package found again after "
            f"{all_names_s:.1f} s"
        )

    def _work(self, start: int) -> None:
        number = start
        while not self._stop.is_set():
            number = (number + NUM_THREADS) % NUM_PACKAGES
            before = time.monotonic()
            found = load(self.tier, number)
            after = time.monotonic()
            with self._lock:
                self.longest_s = max(self.longest_s, after - before)
                if found is None:
                    self.misses += 1
                elif found == features(number):
                    self.hits += 1
                    self.hit_at.append(after)
                else:
                    self.wrong += 1
            if found is None:
                save(self.tier, number)
            time.sleep(0.002)
