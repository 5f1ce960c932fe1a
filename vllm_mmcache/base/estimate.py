# SPDX-License-Identifier: Apache-2.0
"""Seconds by size, learned from what was measured. Any process; no torch."""

import math

import numpy as np

NUM_BUCKETS = 32
WEIGHT = 0.2  # of the newest measurement


class Estimate:
    """Seconds by size (tokens or bytes), learned from what was measured.

    Shapes: values (32,) float64: seconds per unit for sizes from 2^n to 2^(n+1), 0 where unknown. Give an array that
    lies in shared memory, and another process reads the estimate while this one adds to it: one value is written
    whole. One writer; where there are several, a measurement can get lost, no more.
    """

    def __init__(self, values: np.ndarray | None = None) -> None:
        self.values = np.zeros(NUM_BUCKETS) if values is None else values

    def add(self, size: int, seconds: float) -> None:
        """Learn that `size` units took `seconds`. What is not positive and finite tells nothing."""
        if size <= 0 or not 0 < seconds < math.inf:
            return
        bucket, new = _bucket(size), seconds / size
        old = float(self.values[bucket])
        self.values[bucket] = old + WEIGHT * (new - old) if old > 0 else new

    def seconds(self, size: int) -> float | None:
        """What `size` units will take, by the known sizes nearest to it in proportion; None while none is known."""
        if size <= 0:
            return 0.0
        bucket = _bucket(size)
        known = [(abs(n - bucket), value) for n, value in enumerate(self.values.tolist()) if 0 < value < math.inf]
        return min(known)[1] * size if known else None


def _bucket(size: int) -> int:
    return min(size.bit_length() - 1, NUM_BUCKETS - 1)
