# SPDX-License-Identifier: Apache-2.0
"""What a running process takes: CPU seconds, memory and open files, read from /proc; and memory watched over time."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from vllm_mmcache.demo.server import Server, living

MIB = 1 << 20
INTERVAL_S = 0.5
NUM_KEPT = 60  # samples in a result

Number = TypeVar("Number", int, float)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of one process, all its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def resident_bytes(pid: int) -> int:
    """Resident memory of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def server_cpu_s(server: Server) -> dict[str, float]:
    """CPU seconds so far of the API server, and of all other processes of its group together: the engine."""
    return _by_process(server, process_cpu_s)


def server_memory(server: Server) -> dict[str, int]:
    """Resident bytes, alike."""
    return _by_process(server, resident_bytes)


def server_open_files(server: Server) -> dict[str, int]:
    """Open file descriptors, alike."""
    return _by_process(server, lambda pid: len(os.listdir(f"/proc/{pid}/fd")))


def _by_process(server: Server, measure: Callable[[int], Number]) -> dict[str, Number]:
    found: dict[str, Number] = {"api_server": 0, "engine": 0}
    for pid in living(server.process.pid):
        with suppress(OSError):  # it has just ended
            found["api_server" if pid == server.process.pid else "engine"] += measure(pid)
    return found


class Sampler:
    """Calls `look` again and again in a thread, within the block."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.look()
            self._ended.wait(INTERVAL_S)

    def look(self) -> None:
        """Take a sample."""
        raise NotImplementedError


class MemoryWatch(Sampler):
    """Samples the memory of a server's processes."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.start_s = time.monotonic()
        self.samples: list[tuple[float, dict[str, int]]] = []  # (seconds since the start, bytes by process)

    def look(self) -> None:
        self.samples.append((time.monotonic() - self.start_s, server_memory(self.server)))

    def growth(self, warm_up_s: float) -> dict[str, dict[str, Any]]:
        """By process: MiB at the start, after the warm-up, at the end and at most, and the slope after the warm-up."""
        return {process: growth([(at, sizes[process] / MIB) for at, sizes in self.samples], warm_up_s)
                for process in ("api_server", "engine")}  # fmt: skip


def growth(samples: list[tuple[float, float]], warm_up_s: float) -> dict[str, Any]:
    """What (seconds, MiB) samples say; the slope is the line of least squares through those after the warm-up."""
    later = [(at, size) for at, size in samples if at >= warm_up_s]
    slope = statistics.linear_regression(*zip(*later, strict=True)).slope * 60 if len(later) > 1 else None
    every = -(-len(samples) // NUM_KEPT)
    return {
        "start_mib": round(samples[0][1], 1),
        "warm_mib": round(later[0][1], 1) if later else None,
        "end_mib": round(samples[-1][1], 1),
        "most_mib": round(max(size for _, size in samples), 1),
        "slope_mib_per_minute": None if slope is None else round(slope, 2),
        "samples_s_mib": [(round(at, 1), round(size, 1)) for at, size in samples[::every]],
    }
