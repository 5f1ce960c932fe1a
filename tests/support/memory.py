# SPDX-License-Identifier: Apache-2.0
"""What a test's own objects take of memory, whatever other threads of the process take meanwhile."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FRAMES = 25  # between a test and what it has made


@contextmanager
def traced(file: str) -> Iterator[Callable[[], int]]:
    """Gives a function that says how many bytes are in use of what was made from within `file` since the start."""
    mine = tracemalloc.Filter(True, file, all_frames=True)
    tracemalloc.start(FRAMES)
    try:
        yield lambda: sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([mine]).traces)
    finally:
        tracemalloc.stop()
