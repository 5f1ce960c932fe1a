# SPDX-License-Identifier: Apache-2.0
"""What one process measures of a tier is read by another while it writes."""

import multiprocessing
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Event

import numpy as np
import pytest

from vllm_mmcache.base.estimate import NUM_BUCKETS, Estimate


def _write_until(name: str, stop: Event) -> None:
    memory = SharedMemory(name)
    values: np.ndarray = np.ndarray(NUM_BUCKETS, np.float64, memory.buf)
    number = 0
    while not stop.is_set():
        Estimate(values).add(1024, 1024.0 * (1 + number % 97 / 97))
        number += 1
    del values
    memory.close()


@pytest.mark.process
def test_another_process_reads_while_one_writes() -> None:
    context = multiprocessing.get_context("spawn")
    memory = SharedMemory(create=True, size=8 * NUM_BUCKETS)
    values: np.ndarray = np.ndarray(NUM_BUCKETS, np.float64, memory.buf)
    values[:] = 0
    stop = context.Event()
    writer = context.Process(target=_write_until, args=(memory.name, stop))
    writer.start()
    seen: set[float | None] = set()
    while len(seen) < 10 and writer.is_alive():
        seen.add(Estimate(values).seconds(1))
    stop.set()
    writer.join()
    del values
    memory.close()
    memory.unlink()
    assert writer.exitcode == 0
    assert len(seen) == 10, "the writer was not seen at work"
    assert all(one is None or 1 <= one <= 2 for one in seen)
