# SPDX-License-Identifier: Apache-2.0
"""A server under load whose stores are damaged and taken away, and which is killed: answers, failures, memory, files.

A stock server without any cache first gives the answer to each question about each picture. Then a server with the
plugin, a store on disk and a real Valkey answers them to all clients at once. Each fault is in force for some seconds
of load, then the server is killed and started again while it lasts; the next fault is for the new one. At the end one
server goes through all faults without being killed, between two times without a fault: that is where memory and open
files must not grow. Exit code 1 for a wrong answer, a failed request, a fault that left no trace, or growth.
"""

import itertools
import tempfile
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.results import Result
from benchmarks.servers import running_valkey, zoo_server
from scripts.chaos import watch
from scripts.chaos.clients import Clients, Found, cold_answers, confusable, make_pictures
from scripts.chaos.faults import FAULTS, in_force
from scripts.chaos.scene import ARGS, WAYS, Disk, Scene
from vllm_mmcache.demo.server import Server, is_healthy
from vllm_mmcache.zoo import build_cached

FAMILY = "qwen3-vl"
MOST_GROWTH_MIB = 300  # of a process, between the two times without a fault
FIRST_ANSWER_S = 60  # of a new server, which loads late what it needs
MOST_BAD_LINES = 3  # kept of a phase
MOST_GROWTH_FILES = 16  # alike: a connection a client, and as many of ours


def measure(options: Namespace) -> Result:
    """The faults, kills and phases; what must not be is a problem. Stock has the load alone, for as many phases."""
    start, result = time.monotonic(), Result()
    pictures = make_pictures(options.pictures)
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(FAMILY, Path(folder))
        with zoo_server(model, "stock", images=1, args=(*ARGS, "--no-enable-prefix-caching")) as server:
            answers, near_ties = cold_answers(server.url, pictures)
        phases = []
        if "stock" in options.sides:
            with Clients(answers, pictures, options.clients) as clients:
                phases = stock_phases(model, clients, options)
        with ExitStack() as stack:
            disk = stack.enter_context(Disk(Path(folder)))
            peaks = stack.enter_context(watch.Peaks())
            valkey = stack.enter_context(running_valkey())
            clients = stack.enter_context(Clients(answers, pictures, options.clients))
            run = Run(Scene(model, disk, valkey, clients), peaks, options)
            stack.callback(run.scene.close)
            run.all()
    result.details = {
        "answers": len(answers),
        "left_out_as_near_ties": near_ties,
        "confusable_answers": len(confusable(answers)),
        **run.result(),
        "stock": {"phases": phases},
        "seconds": round(time.monotonic() - start),
    }
    for what in ("requests", "wrong", "failed", "excused", "kills", "deaths", "slowest_s"):
        stock = (
            {"stock": sum(one[what] for one in phases)} if phases and what in ("requests", "wrong", "failed") else {}
        )
        result.add("chaos", what, {**stock, "mmcache": result.details[what]})
    for what, number in growth(result.details["one_server"]).items():
        stock = {"stock": growth(phases[1:])[what]} if phases else {}  # in the first one the caches fill
        result.add("growth", what, {**stock, "mmcache": number})
    result.problems = problems(result.details)
    return result


def stock_phases(model: Path, clients: Clients, options: Namespace) -> list[dict[str, Any]]:
    """A stock server under the same load: its answers have to be right, and its growth is the measure for ours."""
    phases = []
    args = (*ARGS, "--enable-prefix-caching")
    with zoo_server(model, "stock", images=1, args=args) as server, watch.Peaks() as peaks:
        peaks.look_at(server)
        clients.serve(server.url)
        clients.wait_for_an_answer(FIRST_ANSWER_S)
        for _ in range(len(options.faults or FAULTS) + 3):
            time.sleep(options.seconds)
            phases.append({**clients.take().as_dict(), **peaks.take()})
        peaks.look_at(None)
        clients.down()
    return phases


def growth(phases: list[dict[str, Any]]) -> dict[str, int]:
    """Of memory and open files, from the first of some phases to the last."""
    first, last = phases[0], phases[-1]
    return {name: last[name] - first[name] for name in first if name.endswith(("_mib", "_files"))}


class Run:
    """The phases, one after the other, and what was found in each."""

    def __init__(self, scene: Scene, peaks: watch.Peaks, options: Namespace) -> None:
        self.scene = scene
        self.total = Found()
        self.kills = 0
        self.deaths = 0
        self.killed: list[dict[str, Any]] = []
        self.one_server: list[dict[str, Any]] = []
        self._peaks = peaks
        self._options = options
        wanted = options.faults or list(FAULTS)
        self._faults = [name for name in wanted if scene.disk.is_mounted or not FAULTS[name].needs_mount]
        self._left_out = sorted(set(wanted) - set(self._faults))
        self._before: dict[str, float] = {}

    def all(self) -> None:
        """Under each fault some load, a kill and a start; then all faults for one server."""
        self._start()
        self._phase("nothing", 0)  # fills the stores
        for number, way in zip(range(self._options.kills), itertools.cycle(WAYS), strict=False):
            self.killed.append(self._phase(self._faults[number % len(self._faults)], number, way))
        self._phase("nothing", 0)
        for number, name in enumerate(("nothing", *self._faults, "nothing")):
            self.one_server.append(self._phase(name, number))

    def result(self) -> dict[str, Any]:
        """What was found, for JSON."""
        return {
            **{name: value for name, value in self.total.as_dict().items() if name != "errors"},
            "kills": self.kills,
            "deaths": self.deaths,
            "starts_s": self.scene.starts_s,
            "faults_left_out": self._left_out,
            "killed": self.killed,
            "one_server": self.one_server,
        }

    def _phase(self, name: str, seed: int, way: str = "") -> dict[str, Any]:
        """A fault under load, and while it lasts a kill, if a way is named, and a start."""
        fault = FAULTS[name]
        with in_force(fault, self.scene, seed):
            seen = self._load(max(self._options.seconds, fault.least_s))
            if way or not is_healthy(self._server.url):
                self._deaths_or_kill(way)
        found = self.scene.clients.take()
        self.total.add(found)
        phase = {"fault": name, "then_killed": way, **found.as_dict(), **seen}
        phase["has_left_a_trace"] = watch.has_grown(fault.seen, phase["counters"])
        print({one: value for one, value in phase.items() if value not in ("", [])}, flush=True)
        return phase

    def _load(self, seconds: float) -> dict[str, Any]:
        """Let the clients ask for so long after the first answer; what is seen of the server meanwhile."""
        server = self._server
        self._peaks.take()
        self.scene.clients.serve(server.url)
        self.scene.clients.wait_for_an_answer(FIRST_ANSWER_S)
        time.sleep(seconds)
        after = watch.counters(server.url)
        growth = watch.grown(self._before, after)
        self._before = after
        return {**self._peaks.take(), "counters": growth, "bad_lines": watch.bad_lines(server)[:MOST_BAD_LINES]}

    def _deaths_or_kill(self, way: str) -> None:
        if is_healthy(self._server.url):
            self.kills += 1
        else:
            self.deaths += 1
            print(self._server.log_path.read_text(errors="replace")[-5000:], flush=True)
        self._peaks.look_at(None)
        self.scene.kill(way or "all")
        self._start()

    def _start(self) -> None:
        """Raises: EnvironmentProblem where the server does not start, whatever fault is in force."""
        server = self.scene.start()
        self._peaks.look_at(server)
        self._before = watch.counters(server.url)

    @property
    def _server(self) -> Server:
        assert self.scene.server is not None
        return self.scene.server


def problems(result: dict[str, Any]) -> list[str]:
    """What must not be, in words; none where all is well."""
    found = []
    for name in ("wrong", "failed", "deaths", "confusable_answers"):
        if result[name]:
            found.append(f"{result[name]} {name.replace('_', ' ')}")
    found += [f"no trace of: {one['fault']}" for one in result["killed"] if not one["has_left_a_trace"]]
    phases = [*result["killed"], *result["one_server"]]
    found += [f"{one['fault']}: {line}" for one in phases for line in one["bad_lines"]]
    first, last = result["one_server"][0], result["one_server"][-1]
    for name, number in growth(result["one_server"]).items():
        if number > (MOST_GROWTH_MIB if name.endswith("_mib") else MOST_GROWTH_FILES):
            found.append(f"{name} has grown from {first[name]} to {last[name]}")
    return found
