# SPDX-License-Identifier: Apache-2.0
"""What the processes of a running server take: CPU seconds, memory and open files."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from mmcache_tools.harness.server import Server, living
from psutil import NoSuchProcess, Process

MIB = 1 << 20
INTERVAL_S = 0.5


def cpu_s(process: Process) -> float:
    """CPU seconds so far of one process, all its threads, without its children."""
    return float(sum(process.cpu_times()[:2]))


def server_cpu_s(server: Server) -> dict[str, float]:
    """Of the API server, and of all other processes of its group together: the engine."""
    return _by_process(server, cpu_s)


def server_memory(server: Server) -> dict[str, int]:
    """Resident bytes, alike."""
    return _by_process(server, lambda process: process.memory_info().rss)


def server_open_files(server: Server) -> dict[str, int]:
    """Open file descriptors, alike."""
    return _by_process(server, Process.num_fds)


def _by_process(server: Server, measure: Callable[[Process], float]) -> dict[str, Any]:
    found: dict[str, Any] = {"api_server": 0, "engine": 0}
    for pid in living(server.process.pid):
        with suppress(NoSuchProcess):  # it has just ended
            found["api_server" if pid == server.process.pid else "engine"] += measure(Process(pid))
    return found


class Sampler:
    """Calls `look` again and again in a thread, within the block."""

    interval_s = INTERVAL_S

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
            self._ended.wait(self.interval_s)

    def look(self) -> None:
        """Take a sample."""
        raise NotImplementedError
