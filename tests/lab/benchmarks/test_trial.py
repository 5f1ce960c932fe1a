# SPDX-License-Identifier: Apache-2.0
"""`make bench-trial`: starts in turn, goes on where it was cut off, and tells a false alarm with its reason."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import trial
from benchmarks.results import Result
from benchmarks.rows import TARGETS, add_targets
from benchmarks.run import options_of
from vllm_mmcache.trial import vllm_engine
from vllm_mmcache.trial.verdict import Verdict

FOUND: dict[str, Any] = {**dict.fromkeys(trial.COUNTED, 10), "exact": ["features"], "off": {}}
DIFFERED = {**FOUND, "requests": 14, "off": {"features": "its trial on this engine was not exact: says a test"}}
TWO = ("--families", "qwen3-vl", "gemma3, bfloat16", "--engines", "v1", "--at-once", "1")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases of the engines that were started, none of them a real one; "gemma3" alone fails to start."""
    cases: list[str] = []

    def try_one(case: str, root: str) -> dict[str, Any]:
        if case == "gemma3, v1":
            raise RuntimeError("an engine died")
        cases.append(case)
        return DIFFERED if "v2" in case else FOUND

    monkeypatch.setattr(trial, "STARTS", tmp_path / "starts.jsonl")
    monkeypatch.setattr(trial, "try_one", try_one)
    monkeypatch.setattr(trial, "last_change", lambda *files: "a commit")
    return cases


@pytest.fixture
def run(started: list[str]) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        result = trial.measure(options_of("trial", list(arguments))[0])
        add_targets("trial", result)
        return result

    return run


def test_starts_are_in_turn_and_go_on_where_they_were_cut_off(
    run: Callable[..., Result], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*TWO, "--starts", "3")
    assert started == ["qwen3-vl, v1", "gemma3, bfloat16, v1", "qwen3-vl, v1"]
    started.clear()
    result = run(*TWO, "--starts", "5")
    assert started == ["gemma3, bfloat16, v1", "qwen3-vl, v1"], "the others are known"
    assert result.found["all starts"] == {"starts": {"mmcache": 5}, "false_alarms": {"mmcache": 0}}
    assert result.details["qwen3-vl, v1"] == {"starts": 3, "exact": ["features"]}
    assert result.problems == []
    started.clear()
    run(*TWO, "--starts", "2", "--again")
    assert len(started) == 2
    monkeypatch.setattr(trial, "last_change", lambda *files: "another commit")
    run(*TWO, "--starts", "2")
    assert len(started) == 4, "what was seen of another commit says nothing of this one"


def test_the_first_start_of_each_case_is_alone_and_its_seconds_count(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are two at once: each waits until another is under way, which alone would never be."""
    pair, numbers = threading.Barrier(2, timeout=60), iter(range(10))

    def try_one(case: str, root: str) -> dict[str, Any]:
        number = next(numbers)
        if number >= 2:
            pair.wait()
        return {**FOUND, "seconds": 100 * number, "steps": number}

    monkeypatch.setattr(trial, "try_one", try_one)
    result = run(*TWO, "--starts", "6", "--at-once", "2")
    assert [result.found[case]["seconds"]["mmcache"] for case in result.details] == [0, 100]
    assert max(found["steps"]["mmcache"] for case, found in result.found.items() if case in result.details) == 5


def test_a_false_alarm_is_told_and_misses_the_target(run: Callable[..., Result]) -> None:
    """The control is the start on V1."""
    result = run("--families", "qwen3-vl", "--engines", "v1", "v2", "--starts", "2")
    assert result.problems == [
        "a false alarm on qwen3-vl, v2: features: its trial on this engine was not exact: says a test"
    ]
    met = {target.text: result.found[target.text]["ratio"]["mmcache"] <= target.limit for target in TARGETS["trial"]}
    assert list(met.values()) == [False, True, False], met


def test_an_engine_that_does_not_start_is_no_start(run: Callable[..., Result], started: list[str]) -> None:
    result = run("--families", "gemma3", "qwen3-vl", "--engines", "v1", "--starts", "2")
    assert result.problems == ["failed: gemma3, v1: an engine died"]
    assert result.found["all starts"]["starts"] == {"mmcache": 1}


def test_the_engine_is_that_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run_worker(call: str, side: str, environ: dict[str, str], **given: Any) -> dict[str, Any] | None:
        asked.append((environ["VLLM_USE_V2_MODEL_RUNNER"], environ["MMCACHE_TRIAL_ALL"], given))
        return FOUND if given["precision"] is None else None

    monkeypatch.setattr(trial, "run_worker", run_worker)
    assert trial.try_one("gemma3, v1", "models") == FOUND
    with pytest.raises(RuntimeError, match="no trial"):
        trial.try_one("qwen3-vl-moe, bfloat16, v2-async", "models")
    assert asked == [
        ("0", "1", {"root": "models", "family": "gemma3", "precision": None}),
        ("1", "1", {"root": "models", "family": "qwen3-vl-moe", "precision": "bfloat16"}),
    ]


def test_what_is_kept_is_what_the_trial_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is an engine without a trial."""
    verdict = Verdict(passed=["metrics"], differed={"features": "says a test"}, num_requests=9, seconds=1.234)

    class OneTrial:
        def run(self) -> Verdict:
            return verdict

    @contextmanager
    def engine(root: Path, family: str, settings: dict[str, Any], **given: Any) -> Iterator[None]:
        if family == "gemma3":
            OneTrial.run(OneTrial())
        yield

    monkeypatch.setattr(trial, "Trial", OneTrial)
    monkeypatch.setattr(trial, "count", lambda: {"steps": 30})
    monkeypatch.setattr(trial, "started", engine)
    found = trial.trial_of(Path(), "gemma3", None)
    reason = "its trial on this engine was not exact: says a test"
    assert found == {"steps": 30, "requests": 9, "seconds": 1.23, "exact": ["metrics"], "off": {"features": reason}}
    assert trial.trial_of(Path(), "qwen3-vl", None) is None


def test_steps_and_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler:
        def schedule(self) -> Any:
            return SimpleNamespace(total_num_scheduled_tokens=steps.pop(0))

    class Engine:
        def __init__(self) -> None:
            self.scheduler = Scheduler()

        def ask(self, prompt: Any) -> Any:
            while steps:
                self.scheduler.schedule()
            return SimpleNamespace(num_cached_tokens=32, tower_images=2)

    steps = [64, 4, 0, 1]
    monkeypatch.setattr(trial, "TrialEngine", Engine)
    assert {"ask", "__init__"} <= vars(vllm_engine.TrialEngine).keys(), "what it counts around"
    counts = trial.count()
    Engine().ask(SimpleNamespace(token_ids=range(100)))
    counted = {"steps": 3, "computed_tokens": 69, "prompt_tokens": 100, "cached_tokens": 32, "tower_images": 2}
    assert counts == {**dict.fromkeys(trial.COUNTED, 0), **counted}
    assert json.loads(json.dumps(counts)) == counts
