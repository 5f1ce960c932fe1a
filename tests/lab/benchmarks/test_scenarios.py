# SPDX-License-Identifier: Apache-2.0
"""What carries out the benchmarks of servers: each step on each side, in order; every request is counted or fails."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from mmcache_tools.harness.server import free_port

from benchmarks import probing, scenarios, server_scenarios
from benchmarks.catalogue import BENCHMARKS
from benchmarks.pictures import PHOTOGRAPH, SMALL, data_url, picture
from benchmarks.probing import NAMES, Probed
from benchmarks.results import ROOT
from benchmarks.scenarios import Life, Scenario, Seen, Step, asks, for_a_question, measure, questions
from benchmarks.server_scenarios import agent, ask_through, of_load
from benchmarks.servers import Reply, ask, image_part, read_reply, talk
from tests.support.sizes import larger
from vllm_mmcache.client import OnceTransport

CONVERSATIONS = 4


class Server:
    """Nobody listens there; the processes are those of this group."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.process = SimpleNamespace(pid=os.getpgid(0))


@pytest.fixture
def nobody() -> Any:
    return Probed(Server(), Path(), Path())  # type: ignore[arg-type]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, where servers are started and asked in name only."""
    done: list[str] = []

    class Up(Probed):
        def spent(self) -> Counter[str]:
            """As many requests as were noted, and a second of CPU for each."""
            spent = Counter(dict.fromkeys((*NAMES, "api_server_cpu_s", "engine_cpu_s"), len(done)))
            return spent

    @contextlib.contextmanager
    def server(model: Path, side: str, images: int, args: Any, env: Any) -> Iterator[Probed]:
        done.append(f"{side} up {' '.join(args)}".strip())
        yield Up(Server(), model, Path(side))  # type: ignore[arg-type]
        done.append(f"{side} down")

    monkeypatch.setattr(scenarios, "probed_server", server)
    monkeypatch.setattr(scenarios, "build_cached", lambda *_, **__: Path())
    monkeypatch.setattr(scenarios, "ask", lambda *_: None)
    monkeypatch.setattr(scenarios, "ARTIFACTS", None)
    return done


def step(done: list[str], case: str, name: str, **more: Any) -> Step:
    """Notes that it was done: a question that takes as many seconds as were done before."""

    def drive(up: Probed, seen: Seen) -> None:
        seen.replies.append(Reply(float(len(done)), 0.0, answer=((str(up.folder) if more else "", 0.0),)))
        done.append(f"{up.folder} {name}")

    return Step(case, drive)


def test_a_server_ends_before_the_next_one_starts(done: list[str]) -> None:
    def lives(options: Namespace, side: str, store: str) -> Iterator[Life]:
        assert Path(store).is_dir()
        yield Life([step(done, "", "fill")], [store])
        yield Life([step(done, "again", "first"), step(done, "again", "next")], [store])

    found = measure(Scenario(lives), Namespace(sides=["mmcache", "none"])).found["again"]
    ups = [one.rpartition(" ")[2] for one in done if " up " in one]
    assert ups[0] == ups[1] != ups[2] == ups[3], "a store for each side"
    assert [one.partition(" up ")[0] for one in done] == [
        f"{side} {one}".strip() for side in ("mmcache", "none")
        for one in ("", "fill", "down", "", "first", "next", "down")
    ]  # fmt: skip
    assert found["questions"] == {"mmcache": 2, "none": 2}
    assert found["time_s"] == {"mmcache": 4.5, "none": 11.5}, "the median of both; the first server's is not counted"


def test_servers_that_are_up_at_once_are_asked_in_turn(done: list[str]) -> None:
    def lives(options: Namespace, side: str, store: str) -> Iterator[Life]:
        yield Life(step(done, "case", str(number)) for number in range(3))

    measure(Scenario(lives, is_together=True), Namespace())
    asked = ["stock 0", "mmcache 0", "mmcache 1", "stock 1", "stock 2", "mmcache 2"]
    assert done == ["stock up", "mmcache up", *asked, "mmcache down", "stock down"]


def test_answers_that_differ_are_a_problem(done: list[str]) -> None:
    def lives(options: Namespace, side: str, store: str) -> Iterator[Life]:
        yield Life([step(done, "case", "0", differs=True) if options.differs else step(done, "case", "0")])

    assert measure(Scenario(lives, is_same=True), Namespace(differs=True)).problems == ["the answers differ"]
    assert measure(Scenario(lives, is_same=True), Namespace(differs=False)).problems == []
    assert measure(Scenario(lives), Namespace(differs=True)).problems == []


def test_steps_are_put_together() -> None:
    """Of one and of three questions: costs are those of a question, the time is the median of all."""
    hashed, made = iter([0.0, 4.0, 4.0, 10.0]), iter([0.0, 1.0, 1.0, 4.0])

    class Up(Probed):
        def spent(self) -> Counter[str]:
            zeros = dict.fromkeys((*NAMES, "api_server_cpu_s", "engine_cpu_s"), 0.0)
            return Counter(zeros | {"hash_s": next(hashed), "requests": next(made)})

    up, seen = Up(Server(), Path(), Path()), Seen()  # type: ignore[arg-type]
    for seconds in ([1.0], [2.0, 3.0, 4.0]):
        replies = [Reply(one, one, prompt_tokens=10) for one in seconds]
        scenarios.do(Step("case", lambda up, seen, more=replies: seen.replies.extend(more)), up, seen)  # type: ignore[misc]
    found = dict(for_a_question(Namespace(), {"case": seen}))
    assert (found["case", "questions"], found["case", "time_s"], found["case", "hash_s"]) == (4, 2.5, 2.5)
    assert (found["case", "first_token_s"], found["case", "prompt_tokens"]) == (2.5, 10)
    content = picture(SMALL, 1)
    body = sum(map(len, talk(image_part(data_url(SMALL, content)))()))
    seen.body_bytes = 4 * body
    assert len(content) == pytest.approx(
        dict(for_a_question(Namespace(), {"case": seen}))["case", "encoded_bytes"], abs=300
    )


def test_a_warm_turn_is_measured_by_its_parts() -> None:
    """Each round by itself: a slow one does not count, whichever part it is slow in."""
    zeros = dict.fromkeys((*NAMES, "api_server_cpu_s", "engine_cpu_s"), 0.0)

    def seen_of(*times_s: float, requests: int) -> Seen:
        replies = [Reply(one, one) for one in times_s]
        return Seen(replies, times_s=list(times_s), seconds=1.0, spent=Counter(zeros | {"requests": requests}))

    name = "photographs, JPEG"
    seen = {
        name: seen_of(3.0, 9.0, 3.0, requests=3),
        f"{name}, uuids alone": seen_of(1.0, 1.0, 7.0, requests=3),
        f"{name}, received": seen_of(1.0, 1.0, 1.0, requests=0),
    }
    found = dict(server_scenarios.of_warm_turn(Namespace(pictures=[name], images=3), seen))
    assert found[name, "by_uuids_and_receiving"] == 1.5
    assert found[f"{name}, received", "first_token_s"] == 1.0
    assert (found[name, "questions"], found[f"{name}, uuids alone", "first_token_s"]) == (3, 1.0)
    files = sorted(len(picture(PHOTOGRAPH, number)) for number in range(3))
    assert found[name, "file_bytes"] == files[1]


def test_all_ways_of_a_turn_are_asked_in_turn() -> None:
    options = Namespace(**{**BENCHMARKS["warm_turn"].options, "pictures": ["photographs, JPEG"], "turns": 2})
    lives = {side: life for side in options.sides for life in server_scenarios.warm_turn(options, side, "")}
    cases = [step.case for step in lives["mmcache"].steps]
    ways = [f"photographs, JPEG{way}" for way in server_scenarios.WAYS]
    assert cases == ["", *[""] * 8, *ways, *ways, "", "conversations at once", "photographs, JPEG, unknown"]
    assert "--mm-processor-cache-gb" in lives["stock_best"].args
    assert lives["stock"].args == lives["mmcache"].args
    assert set(BENCHMARKS["warm_turn"].options["pictures"]) <= set(server_scenarios.PICTURES)


def test_a_body_is_received_and_nothing_else() -> None:
    """The application is not called; every other path is the application's."""
    sent: list[dict[str, Any]] = []
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    messages: Iterator[dict[str, Any]] = iter([{"body": b"a", "more_body": True}, {"body": b"b"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def ask_both() -> None:
        layer = probing.layer(app)
        await layer({"path": probing.RECEIVE}, receive, send)
        await layer({"path": "/v1/chat/completions"}, receive, send)

    asyncio.run(ask_both())
    assert next(messages, None) is None, "the body was read"
    assert asked == ["/v1/chat/completions"]
    assert sent[0]["status"] == 200
    assert read_reply(0, 0, sent[1]["body"].decode().splitlines()).text == ""


@larger
@pytest.mark.engine
def test_a_short_load(tmp_path: Path) -> None:
    command = ["benchmarks.run", "load", "--short", "--conversations", str(CONVERSATIONS), "--sides", "mmcache"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--output", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "load.json").read_text())["found"]
    found = {case: {what: sides["mmcache"] for what, sides in counted.items()} for case, counted in content.items()}
    assert found["load"]["failed"] == 0
    assert found["load"]["requests"] >= found["load"]["requests_measured"] > CONVERSATIONS
    assert found["load"]["decodes"] > CONVERSATIONS
    assert 0 < found["load"]["cached_tokens"] < found["load"]["prompt_tokens"]
    assert 0 < found["p50"]["first_token_s"] <= found["p99"]["first_token_s"] <= found["p99"]["whole_s"]
    for process in ("api_server", "engine"):
        assert found[process]["most_mib"] > 100, "not a process that has imported vLLM"


def test_without_a_server_every_request_fails(monkeypatch: pytest.MonkeyPatch, nobody: Any) -> None:
    """Time passes when both conversations have failed once, however long a picture takes."""
    now, both = [0.0], threading.Barrier(2)

    def sleep(seconds: float) -> None:
        both.wait(120)
        now[0] = 1.0

    monkeypatch.setattr(scenarios, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(server_scenarios, "time", SimpleNamespace(sleep=sleep))
    screens, seen = [picture(SMALL, 0)] * server_scenarios.NUM_SCREENS, Seen()
    asks(*(agent(screens, count(), 2) for _ in range(2)), seconds=0.1)(nobody, seen)
    assert not seen.replies
    assert len(seen.failures) == 2
    assert all("ConnectionRefusedError" in failure for failure in seen.failures)


def test_memory_is_looked_at_where_the_first_client_was_answered(nobody: Any) -> None:
    seen = Seen()
    clients = (questions([partial(list, [name])] * 3) for name in (b"0", b"1"))
    asks(*clients, ask=lambda url, body: Reply(0.1, 0.2, text=body[0].decode()))(nobody, seen)
    assert sorted(reply.text for reply in seen.replies) == ["0"] * 3 + ["1"] * 3
    assert [sum(memory.values()) > 1 << 20 for _, memory in seen.memory] == [True] * 3
    assert seen.body_bytes == 6


def test_a_request_that_fails_ends_what_does_not_expect_it(nobody: Any) -> None:
    with pytest.raises(ConnectionRefusedError):
        asks(questions([lambda: [b"{}"]] * 2))(nobody, Seen())


def test_a_conversation_grows_until_its_last_turn() -> None:
    client = agent([picture(SMALL, 0)] * server_scenarios.NUM_SCREENS, count(), 2)
    whole = Reply(0.1, 0.2, answer_tokens=16, text="an answer")
    asked = [json.loads(body[0])["messages"] for body in (next(client), client.send(whole), client.send(whole))]
    assert [[message["role"] for message in messages] for messages in asked] == [
        ["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]
    ]  # fmt: skip
    assert "of task 1" in json.dumps(asked[2]), "a new one"
    with pytest.raises(RuntimeError, match="an answer of 15 tokens instead of 16"):
        client.send(Reply(0.1, 0.2, answer_tokens=15))


def test_growth_is_of_a_load_that_lasts() -> None:

    def numbers(seconds: float, later: int = 60) -> dict[tuple[str, str], float]:
        """Memory was 900 MiB at the start, and after the warm-up grows by 6 MiB a minute."""
        begin_s = 0.2 * seconds
        replies = [Reply(0.1, 0.2, 10, 5, 16, start_s=at) for at in (0.0, begin_s + 1, begin_s + 1.5)][:later]
        tenths = [(0.0, 9000), *((begin_s + at, 8000 + at) for at in range(60))]
        memory = [(at, dict.fromkeys(("api_server", "engine"), size * (1 << 20) // 10)) for at, size in tenths]
        return dict(of_load(Namespace(seconds=seconds), {"load": Seen(replies, ["one failed"], memory=memory)}))

    short, found = numbers(15.0), numbers(300.0)
    assert {what for case, what in short if case == "engine"} == {"end_mib", "most_mib"}
    assert found["engine", "slope_mib_per_minute"] == pytest.approx(6)
    assert (found["engine", "end_mib"], found["engine", "most_mib"]) == (pytest.approx(805.9), 900)
    assert found["load", "requests_measured"] == 2
    assert found["load", "requests_per_s"] == pytest.approx(2 / 1.7)
    assert found["load", "failed"] == 1
    with pytest.raises(RuntimeError, match="1 requests after a warm-up"):
        numbers(300.0, later=2)


@pytest.mark.slow
def test_a_turn_through_the_transport_is_read_as_any_other() -> None:
    asked, events = [], [{"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()
            self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())

        def log_message(self, *_: Any) -> None:
            pass

    status, server = 200, ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, transport = f"http://127.0.0.1:{server.server_address[1]}", OnceTransport(httpx.HTTPTransport())
    turn = talk(image_part(data_url(SMALL, picture(SMALL, 0))))
    try:
        for reply in (ask(url, turn()), ask_through(transport, url, turn())):
            assert (reply.text, reply.is_finished) == ("a", True)
            assert 0 < reply.first_token_s <= reply.whole_s
        assert all(b"what is different now?" in body for body in asked)
        status = 500
        with pytest.raises(RuntimeError, match="answered 500"):
            ask_through(transport, url, turn())
    finally:
        server.shutdown()
        server.server_close()


TOKENS = [
    {"token": "a", "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]},
    {"token": " ", "logprob": -1.0, "top_logprobs": [{"logprob": -1.0}, {"logprob": -1.25}]},
]


def test_what_a_stream_says() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a "}, "logprobs": {"content": TOKENS}}]},
        {"choices": [], "usage": usage},
    ]
    lines = [line for event in events for line in (f"data: {json.dumps(event)}", "")]
    reply = read_reply(0.1, 0.2, [*lines, "data: [DONE]"])
    assert (reply.prompt_tokens, reply.cached_tokens, reply.answer_tokens) == (9, 8, 2)
    assert (reply.text, reply.answer) == ("a ", (("a", -0.5), (" ", -1.0)))
    assert reply.margin == 0.25, "the second token's"
    assert read_reply(0.1, 0.2, ["data:"]).text == ""
    with pytest.raises(RuntimeError, match="an answer ended with"):
        read_reply(0.1, 0.2, ['data: {"error": {}}'])
