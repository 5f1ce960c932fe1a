# SPDX-License-Identifier: Apache-2.0
"""The thread that writes packages to disk and to Redis, so that no request waits for either.

Its queue is bounded in bytes; what does not fit is dropped and counted. One daemon thread per process, started with
the first package; a forked child starts its own, with an empty queue.
"""

import atexit
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_mmcache.features.identity import Identity
from vllm_mmcache.features.lasting import LastingTier
from vllm_mmcache.features.package import Package, pack

logger = logging.getLogger("vllm.mmcache")

EXIT_S = 5.0  # for what is still to be written when the process ends


@dataclass(frozen=True)
class Job:
    """One package on its way to some tiers."""

    identity: Identity
    package: Package
    tiers: Sequence[LastingTier]


class Writer:
    """Writes jobs in the order of their arrival; up to `queue_bytes` of tensors wait."""

    def __init__(self, queue_bytes: int) -> None:
        self._queue_bytes = queue_bytes
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}  # in order of arrival; the first one is being written
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def hand(self, job: Job) -> None:
        """Take a job, or drop and count it; never waits. A package that is already waiting is not taken twice."""
        if self._pid != os.getpid():
            self._begin()
        num_bytes = job.package.num_bytes
        with self._changed:
            if job.identity.key in self._jobs:
                return
            if self._closed or self._waiting_bytes + num_bytes > self._queue_bytes:
                for tier in job.tiers:
                    tier.counters.add(dropped=1)
                return
            self._jobs[job.identity.key] = job
            self._waiting_bytes += num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mmcache-store", daemon=True)
                self._thread.start()
                # A thread that frees tensors while the interpreter ends takes the process down with SIGABRT.
                atexit.register(self.close, EXIT_S)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is written or given up. Returns False after `timeout_s`."""
        if self._pid != os.getpid():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush, then take no more and end the thread. Returns what `flush` did."""
        flushed = self.flush(timeout_s)
        if self._pid == os.getpid():
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join(timeout_s)
            atexit.unregister(self.close)
        return flushed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                key, job = next(iter(self._jobs.items()))
            _write(job)
            with self._changed:
                del self._jobs[key]
                self._waiting_bytes -= job.package.num_bytes
                self._changed.notify_all()
            del job  # its tensors must not wait for the next one


def _write(job: Job) -> None:
    try:
        packed = pack(job.identity, job.package)
        for tier in job.tiers:
            tier.save(job.identity.key, packed)
    except Exception:  # a bug of ours must not end the thread, nor ever reach a request
        for tier in job.tiers:
            tier.counters.add(errors=1)
        logger.exception("mmcache could not write a package; serving goes on without it")
