# SPDX-License-Identifier: Apache-2.0
"""A server under load whose stores are damaged and taken away, and which is killed: answers, failures, memory, files.

A stock server without any cache first gives the answer to each question about each picture. Then a server with the
plugin, a store on disk and a real Valkey answers them to all clients at once. Each fault is in force for some seconds
of load, then the server is killed and started again while it lasts; the next fault is for the new one. At the end one
server goes through all faults without being killed, between two times without a fault: that is where memory and open
files must not grow. Exit code 1 for a wrong answer, a failed request, a fault that left no trace, or growth.
"""

import itertools
import os
import re
import signal
import tempfile
import time
import urllib.request
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from mmcache_tools.harness.server import Server, is_healthy, living
from mmcache_tools.zoo import build_cached

from benchmarks.pictures import url_of
from benchmarks.processes import MIB, server_memory, server_open_files
from benchmarks.results import Result
from benchmarks.servers import running_valkey, zoo_server
from scripts.chaos.clients import PICTURE, Clients, Pair, cold_answers, confusable
from scripts.chaos.faults import FAULTS, Fault, Scene, in_force

FAMILY = "qwen3-vl"
# Little stays in RAM that could spare the stores a question, and all of them are asked, also where the tower is faster.
SETTINGS = {
    "MMCACHE_FEATURE_RAM_BYTES": "1MiB",
    "MMCACHE_STORE_DISK_BYTES": "2MiB",  # less than there are
    "MMCACHE_RECORDS_RAM_BYTES": "0",
    "MMCACHE_RECORDS_DISK_BYTES": "1MiB",
    "MMCACHE_MEDIA_RECORDS": "4",
    "MMCACHE_STORE_REMOTE_TIMEOUT_S": "0.5",  # the default is for a machine that has a core to spare
    "MMCACHE_STORE_WAIT_S": "1",
}
# A KV cache and an encoder cache that hold a few of the pictures.
ARGS = (
    *("--max-model-len", "1024", "--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "64"),
    *("--mm-processor-cache-gb", "0.01", "--enable-prompt-tokens-details"),
)
WAYS = ("all", "api server", "engine")
"""Which processes are killed first; the rest has DYING_S to end, then it is killed, too."""
DYING_S = 2.0
LOOK_S = 0.5
MOST_GROWTH_MIB = 300  # of a process, between the two times without a fault
MOST_GROWTH_FILES = 16  # alike: a connection a client, and as many of ours
MOST_BAD_LINES = 3  # kept of a phase
NEVER = ("wrong", "failed", "deaths", "confusable_answers")
COUNTER = re.compile(r"^mmcache:((?:features|record)_\w+)_total{(?:tier|place)=\"(\w+)\".*} (\S+)$", re.MULTILINE)
# Ours, and of a kind that no fault of a store may cause.
BAD_LINE = re.compile(r" ERROR .*\] mmcache|Traceback \(most recent call last\)|Fatal Python error")

Phase = dict[str, Any]  # what clients and server showed: numbers, errors and bad lines


def measure(options: Namespace) -> Result:
    """The faults, kills and phases; what must not be is a problem. Stock has the load alone, for as many phases."""
    result, stock = Result(), list[Phase]()
    pictures = [url_of(PICTURE, number) for number in range(options.pictures)]
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(FAMILY, Path(folder))
        with zoo_server(model, "stock", images=1, args=(*ARGS, "--no-enable-prefix-caching")) as server:
            answers = cold_answers(server.url, pictures)
        clients = partial(Clients, answers=answers, pictures=pictures, number=options.clients)
        if "stock" in options.sides:
            with zoo_server(model, "stock", images=1, args=(*ARGS, "--enable-prefix-caching")) as server:
                for _ in range(len(options.faults or FAULTS) + 3):
                    with clients(server.url) as load:
                        most = most_taken(server, options.seconds)
                    stock.append({**load.found, **most})
        with running_valkey() as valkey, Scene(Path(folder), valkey) as scene:
            details = Run(model, scene, clients, options).all()
    result.details = {"answers": len(answers), "confusable_answers": len(confusable(answers)), **details}
    result.details["stock"] = {"phases": stock}
    for what in ("requests", "wrong", "failed", "excused", "kills", "deaths", "slowest_s"):
        compared = {"stock": total(stock, what)} if stock and what in ("requests", "wrong", "failed") else {}
        result.add("chaos", what, {**compared, "mmcache": details[what]})
    for what, grown in growth(details["one_server"]).items():
        compared = {"stock": growth(stock[1:])[what]} if stock else {}  # in the first one the caches fill
        result.add("growth", what, {**compared, "mmcache": grown})
    result.problems = problems(result.details)
    return result


def most_taken(server: Server, seconds: float) -> Counter[str]:
    """The most of memory and open files that a server's processes take within so long."""
    most, end = Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        most |= Counter({f"{process}_mib": size // MIB for process, size in server_memory(server).items()})
        most |= Counter({f"{process}_files": number for process, number in server_open_files(server).items()})
        time.sleep(LOOK_S)
    return most


def total(phases: Sequence[Phase], what: str) -> int:
    return sum(one[what] for one in phases)


def growth(phases: Sequence[Phase]) -> dict[str, int]:
    """Of memory and open files, from the first of some phases to the last."""
    first, last = phases[0], phases[-1]
    return {name: last.get(name, 0) - first[name] for name in first if name.endswith(("_mib", "_files"))}


def counters(url: str) -> Counter[str]:
    """The counters of the stores as `name{place}`, without `mmcache:` and `_total`; empty where nobody answers."""
    found = Counter[str]()
    with suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        for name, place, value in COUNTER.findall(answer.read().decode()):
            found[f"{name}{{{place}}}"] += round(float(value))
    return found


def has_left_a_trace(fault: Fault, grown: Iterable[str]) -> bool:
    """Whether one of its counters is among those that have grown."""
    return any(name.startswith(fault.seen) for name in grown)


class Run:
    """The phases, one after the other, of a server that is started again after each kill."""

    _before: Counter[str]
    """The server's counters when the last phase ended, or when it was started."""

    def __init__(self, model: Path, scene: Scene, clients: Callable[..., Clients], options: Namespace) -> None:
        self._model, self._scene, self._clients, self._options = model, scene, clients, options
        self._up = ExitStack()  # the server
        self._excused: list[Pair] = []  # under way at the last kill

    def all(self) -> dict[str, Any]:
        """Under each fault some load, a kill and a start; then all faults for one server. What was found, for JSON."""
        wanted = self._options.faults or list(FAULTS)
        faults = [name for name in wanted if self._scene.is_mounted or not FAULTS[name].needs_mount]
        with self._up:
            self._start()
            first = self._phase("nothing", 0)  # fills the stores
            ways = zip(range(self._options.kills), itertools.cycle(faults), itertools.cycle(WAYS))
            killed = [self._phase(fault, number, way) for number, fault, way in ways]
            again = self._phase("nothing", 0)
            one_server = [self._phase(name, number) for number, name in enumerate(("nothing", *faults, "nothing"))]
        phases = [first, *killed, again, *one_server]
        return {
            **{what: total(phases, what) for what in ("requests", "wrong", "failed", "excused")},
            "slowest_s": max(phase["slowest_s"] for phase in phases),
            "kills": len(killed) - total(killed, "died"),
            "deaths": total(phases, "died"),
            "faults_left_out": sorted(set(wanted) - set(faults)),
            "killed": killed,
            "one_server": one_server,
        }

    def _phase(self, name: str, seed: int, way: str = "") -> Phase:
        """A fault under load, and while it lasts a kill, if a way is named, and a start."""
        fault = FAULTS[name]
        with self._clients(self._server.url, first=self._excused) as clients, in_force(fault, self._scene, seed):
            clients.wait()
            most = most_taken(self._server, max(self._options.seconds, fault.least_s))
            now = counters(self._server.url)
            grown, self._before = now - self._before, now
            log = self._server.log_path.read_text(errors="replace")
            if has_died := not is_healthy(self._server.url):
                print(log[-5000:], flush=True)
            if way or has_died:
                clients.is_killed = True
                kill(self._server, way or "all")
                self._up.close()
                self._start()
        self._excused = clients.excused
        phase = {"fault": name, "then_killed": way, "died": int(has_died), **clients.found, **most}
        phase["errors"] = clients.errors
        phase["bad_lines"] = [line for line in log.splitlines() if BAD_LINE.search(line)][:MOST_BAD_LINES]
        phase["has_left_a_trace"] = has_left_a_trace(fault, grown)
        shown = {**phase, "counters": dict(grown)}
        print({one: value for one, value in shown.items() if value not in ("", [])}, flush=True)
        return phase

    def _start(self) -> None:
        """A new server, healthy. Raises: EnvironmentProblem, whatever fault is in force."""
        env = {**SETTINGS, "MMCACHE_STORE": f"{self._scene.place} {self._scene.valkey.url}"}
        self._server = self._up.enter_context(zoo_server(self._model, "mmcache", images=1, args=ARGS, env=env))
        self._before = counters(self._server.url)


def kill(server: Server, way: str) -> None:
    """End a server as `way` says, without a word to it."""
    leader, deadline = server.process.pid, time.monotonic() + DYING_S
    for pid in living(leader):
        if way == "all" or (way == "api server") == (pid == leader):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    while living(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def problems(details: Mapping[str, Any]) -> list[str]:
    """What must not be, in words; none where all is well."""
    phases = [*details["killed"], *details["one_server"]]
    found = [f"{details[what]} {what.replace('_', ' ')}" for what in NEVER if details[what]]
    found += [f"no trace of: {one['fault']}" for one in details["killed"] if not one["has_left_a_trace"]]
    found += [f"{one['fault']}: {line}" for one in phases for line in one["bad_lines"]]
    for name, number in growth(details["one_server"]).items():
        if number > (MOST_GROWTH_MIB if name.endswith("_mib") else MOST_GROWTH_FILES):
            found.append(f"{name} grew by {number}")
    return found
