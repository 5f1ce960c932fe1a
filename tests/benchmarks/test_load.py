# SPDX-License-Identifier: Apache-2.0
"""The load test: on a real server every request is answered and counted, and without one every request fails."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import load
from benchmarks.processes import growth
from benchmarks.results import ROOT
from benchmarks.servers import Reply, read_reply
from tests.sizes import larger
from vllm_mmcache.demo.server import free_port

CONVERSATIONS = 4


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
    assert found["load"]["images"] > CONVERSATIONS
    assert 0 < found["load"]["cached_tokens"] < found["load"]["prompt_tokens"]
    assert 0 < found["p50"]["first_token_s"] <= found["p99"]["first_token_s"] <= found["p99"]["whole_s"]
    for process in ("api_server", "engine"):
        assert found[process]["most_mib"] > 100, "not a process that has imported vLLM"


def test_without_a_server_every_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes when both conversations have failed once, however long a picture takes."""
    now, both = [0.0], threading.Barrier(2)

    def sleep(seconds: float) -> None:
        both.wait(120)
        now[0] = 1.0

    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    clients = load.Load(f"http://127.0.0.1:{free_port()}", 2)
    clients.run(0.1)
    assert not clients.asked
    assert len(clients.failures) == 2
    assert all("ConnectionRefusedError" in failure for failure in clients.failures)


def test_growth_is_of_a_load_that_lasts() -> None:
    clients = load.Load("http://nowhere", 1)
    clients.asked = [(at, Reply(0.1, 0.2, 10, 5, 16, "")) for at in (1.0, 2.0, 3.0)]
    growth = {"engine": {"end_mib": 2.0, "slope_mib_per_minute": 9.0, "samples_s_mib": []}}
    for seconds, names in ((15.0, {"end_mib"}), (300.0, {"end_mib", "slope_mib_per_minute"})):
        clients.seconds = seconds
        found = load.numbers(clients, growth, warm_up_s=1.5)
        assert {what for case, what in found if case == "engine"} == names
    assert found["load", "requests_measured"] == 2
    assert found["load", "requests_per_s"] == pytest.approx(2 / 1.7)
    with pytest.raises(RuntimeError, match="1 requests after a warm-up"):
        load.numbers(clients, growth, warm_up_s=2.5)


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


def test_growth_is_that_of_the_line_after_the_warm_up() -> None:
    samples = [(float(second), 500.0 + min(second, 60) * 5 + second * 0.1) for second in range(301)]
    found = growth(samples, warm_up_s=60)
    assert found["slope_mib_per_minute"] == 6
    assert (found["start_mib"], found["warm_mib"], found["end_mib"], found["most_mib"]) == (500, 806, 830, 830)
    assert len(found["samples_s_mib"]) <= 60
    assert growth(samples[:5], warm_up_s=60)["slope_mib_per_minute"] is None
