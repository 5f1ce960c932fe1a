# SPDX-License-Identifier: Apache-2.0
"""What is watched of a server under faults: peaks of memory and open files, its counters, and errors in its log."""

import re
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any

from benchmarks.processes import MIB, Sampler, server_memory, server_open_files
from vllm_mmcache.demo.server import Server

COUNTED = re.compile(r"^mmcache:((?:features|record)_\w+)_total{(?:tier|place)=\"(\w+)\".*} (\S+)$", re.MULTILINE)
SHOWN = ("hits", "misses", "saved", "evictions", "errors", "set_aside", "corrupt", "dropped")
# Ours, and of a kind that no fault of a store may cause.
BAD_LINE = re.compile(r" ERROR .*\] mmcache|Traceback \(most recent call last\)|Fatal Python error")


class Peaks(Sampler):
    """The most that a server's processes took since the last `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._most: dict[str, int] = {}

    def look_at(self, server: Server | None) -> None:
        with self._lock:
            self._server = server

    def take(self) -> dict[str, int]:
        """By process, `..._mib` and `..._files`."""
        self.look()
        with self._lock:
            most, self._most = self._most, {}
        return most

    def look(self) -> None:
        with self._lock:
            if self._server is None:
                return
            seen = {f"{process}_mib": size // MIB for process, size in server_memory(self._server).items()}
            seen |= {f"{process}_files": number for process, number in server_open_files(self._server).items()}
            for name, value in seen.items():
                self._most[name] = max(value, self._most.get(name, 0))


def counters(url: str) -> dict[str, float]:
    """The counters of the stores as `name{place}`, without `mmcache:` and `_total`; empty where nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    found: dict[str, float] = {}
    for name, place, value in COUNTED.findall(text):
        if name.partition("_")[2] in SHOWN:
            found[f"{name}{{{place}}}"] = found.get(f"{name}{{{place}}}", 0.0) + float(value)
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """What has grown, and by how much."""
    rows = {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
    return {name: rows[name] for name in sorted(rows) if rows[name]}


def has_grown(names: tuple[str, ...], growth: Mapping[str, Any]) -> bool:
    """Whether one of the counters is among them; a name without a place stands for all places."""
    return any(one == name or one.partition("{")[0] == name for name in names for one in growth)


def bad_lines(server: Server) -> list[str]:
    """Lines of the server's log that say that something of ours failed as it must not."""
    return [line for line in server.log_path.read_text(errors="replace").splitlines() if BAD_LINE.search(line)]
