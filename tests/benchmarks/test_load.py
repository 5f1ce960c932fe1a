# SPDX-License-Identifier: Apache-2.0
"""The load test: on a real server every request is answered and counted, and without one every request fails."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.load import talks
from benchmarks.load.talks import Load
from benchmarks.processes import growth
from benchmarks.summary import ROOT
from tests.sizes import larger
from vllm_mmcache.demo.server import free_port

CONVERSATIONS = 4


@larger
@pytest.mark.engine
def test_a_short_load(tmp_path: Path) -> None:
    command = ["benchmarks.load.run", "--seconds", "15", "--conversations", str(CONVERSATIONS), "--sides", "mmcache"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--output", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "load.json").read_text())["mmcache"]
    assert found["failed"] == 0
    assert found["requests"] >= found["requests_measured"] > CONVERSATIONS
    assert found["images"] > CONVERSATIONS
    assert 0 < found["cached_tokens"] < found["prompt_tokens"]
    assert 0 < found["first_token_s"]["p50"] <= found["first_token_s"]["p99"] <= found["whole_s"]["p99"]
    for process in ("api_server", "engine"):
        assert found["memory"][process]["most_mib"] > 100, "not a process that has imported vLLM"


def test_without_a_server_every_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes when both conversations have failed once, however long a picture takes."""
    now, both = [0.0], threading.Barrier(2)

    def sleep(seconds: float) -> None:
        both.wait(120)
        now[0] = 1.0

    monkeypatch.setattr(talks, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    load = Load(f"http://127.0.0.1:{free_port()}", 2)
    load.run(0.1)
    assert not load.asked
    assert len(load.failures) == 2
    assert all("APIConnectionError" in failure for failure in load.failures)


def test_growth_is_that_of_the_line_after_the_warm_up() -> None:
    samples = [(float(second), 500.0 + min(second, 60) * 5 + second * 0.1) for second in range(301)]
    found = growth(samples, warm_up_s=60)
    assert found["slope_mib_per_minute"] == 6
    assert (found["start_mib"], found["warm_mib"], found["end_mib"], found["most_mib"]) == (500, 806, 830, 830)
    assert len(found["samples_s_mib"]) <= 60
    assert growth(samples[:5], warm_up_s=60)["slope_mib_per_minute"] is None
