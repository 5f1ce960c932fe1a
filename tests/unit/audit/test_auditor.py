# SPDX-License-Identifier: Apache-2.0
"""What the audit asks, and what it makes of the answers; the engine is one that answers as a test says."""

import math
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.audit import samples
from vllm_mmcache.audit.auditor import LONGEST_RUN_S, Auditor
from vllm_mmcache.audit.samples import MOST_BYTES, MOST_WAITING, Sample, Samples
from vllm_mmcache.base import settings, uses
from vllm_mmcache.metrics import counters

RIGHT = {1: math.log(0.6), 2: math.log(0.4)}
NEAR = {1: math.log(0.58), 2: math.log(0.42)}  # 0.02 apart
WRONG = {1: math.log(0.1), 2: math.log(0.9)}


class Scripted:
    """Answers of an engine, by the kind of request."""

    floor = 0.01

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.aborted: list[Any] = []
        self.num_ended = 0
        self.is_free = True
        self.is_reusing = True

    def may_begin(self) -> bool:
        return self.is_free

    def ask(self, sample: Sample, run: uses.Run, *, hit_tokens: int | None = None) -> Any:
        kind = "cold_again" if hit_tokens is not None else run
        self.asked.append(SimpleNamespace(request_id=str(len(self.asked)), kind=kind))
        return self.asked[-1]

    def reused(self, request: Any) -> bool:
        return self.is_reusing

    def hit_of(self, request: Any) -> int:
        return 32

    def ended(self, request: Any) -> None:
        self.num_ended += 1

    def abort(self, request: Any) -> None:
        self.aborted.append(request)

    def expect_idle(self) -> None:
        pass


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
        monkeypatch.setattr(settings, "_current", settings.Settings(audit=1, audit_time=100, **values))
        self.counted: Counter[tuple[str, ...]] = Counter()
        monkeypatch.setattr(counters.AUDIT, "add", lambda n, *labels: self.counted.update({labels: n}))
        monkeypatch.setattr(uses, "_is_wanted", True)
        self.off: list[tuple[str, str]] = []
        self.engine = Scripted()
        self.auditor = Auditor(self.engine, lambda component, reason: self.off.append((component, reason)))

    def finish(self, *components: str, num_bytes: int = 1) -> None:
        """A user's request that used these has its answer."""
        self.auditor.on_work()
        request = SimpleNamespace()
        for component in components:
            uses.note(request, component)
        self.auditor.on_finished(request, lambda used: sample(used, num_bytes))

    def audit(self, **answers: dict[int, float] | None) -> list[str]:
        """Let one sample be audited; returns what was asked."""
        before = len(self.engine.asked)
        self.auditor.on_idle()
        while self.auditor.is_asking:
            request = self.engine.asked[-1]
            assert self.auditor.is_own(request.request_id)
            self.auditor.on_output(answers[request.kind])
        return [request.kind for request in self.engine.asked[before:]]


def sample(components: frozenset[str], num_bytes: int = 1, time_s: float | None = None) -> Sample:
    return Sample("name", (1, 2, 3), (), None, "salt", components, 2, num_bytes, time_s or time.monotonic())


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, no_role: None) -> Rig:
    return Rig(monkeypatch)


def test_a_right_answer_takes_two_questions(rig: Rig) -> None:
    rig.finish("features", "block_keys")
    assert rig.audit(warm=RIGHT, cold=RIGHT) == ["warm", "cold"]
    assert rig.counted == {("features", "match"): 1, ("block_keys", "match"): 1}
    assert rig.engine.num_ended == 2


def test_what_the_engine_does_not_repeat_itself_is_no_mismatch(rig: Rig) -> None:
    rig.finish("block_keys")
    assert rig.audit(warm=NEAR, cold=RIGHT, cold_again=NEAR) == ["warm", "cold", "cold_again"]
    assert rig.counted == {("block_keys", "match"): 1}
    rig.finish("block_keys")
    rig.audit(warm=NEAR, cold=RIGHT, cold_again=RIGHT)
    assert rig.counted == {("block_keys", "match"): 1, ("block_keys", "mismatch"): 1}


@pytest.mark.parametrize(
    ("components", "features", "blamed"),
    [
        (("features",), WRONG, "features"),
        (("features",), RIGHT, "features"),
        (("features", "image_checkpoints", "block_keys"), WRONG, "features"),
        (("features", "image_checkpoints", "block_keys"), RIGHT, "image_checkpoints"),
        (("features", "block_keys"), RIGHT, "block_keys"),
    ],
)
def test_who_is_to_blame(rig: Rig, components: tuple[str, ...], features: dict[int, float], blamed: str) -> None:
    rig.finish(*components)
    assert rig.audit(warm=WRONG, cold=RIGHT, cold_again=RIGHT, features=features)[-1] == "features"
    assert rig.counted == {(blamed, "mismatch"): 1}


def test_after_three_mismatches_it_is_switched_off_before_anything_else(
    rig: Rig, log: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        rig.finish("block_keys")
        rig.audit(warm=WRONG, cold=RIGHT, cold_again=RIGHT)
        assert not rig.off, f"after {number + 1}, in a step"
        if number < 2:
            rig.auditor.on_idle()
            assert not rig.off
    rig.auditor.on_work()
    assert rig.off == [("block_keys", "3 answers in the audit were not those of cold runs")]
    assert log.text.count("the audit found an answer") == 3
    assert "block_keys is switched off" in log.text


def test_a_request_ends_the_audit(rig: Rig) -> None:
    rig.finish("block_keys")
    rig.auditor.on_idle()
    assert rig.auditor.is_asking
    rig.auditor.on_work()
    assert not rig.auditor.is_asking
    assert rig.engine.aborted == rig.engine.asked
    assert rig.counted == {("block_keys", "cut"): 1}
    assert rig.engine.num_ended == 1
    rig.auditor.on_output(WRONG)  # of a step that was under way
    assert rig.counted == {("block_keys", "cut"): 1}


@pytest.mark.parametrize("how", ["failed", "lost", "late"])
def test_an_audit_that_comes_to_nothing(rig: Rig, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.finish("block_keys")
    rig.auditor.on_idle()
    if how == "failed":
        rig.auditor.on_output(None)
    elif how == "lost":
        rig.auditor.on_lost(rig.engine.asked[-1])
    else:
        rig.auditor.on_step()
        assert rig.auditor.is_asking
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + LONGEST_RUN_S + 1)
        rig.auditor.on_step()
        assert rig.engine.aborted
    assert not rig.auditor.is_asking
    assert rig.counted == {("block_keys", "cut"): 1}


def test_what_is_not_there_any_more(rig: Rig) -> None:
    rig.engine.is_reusing = False
    rig.finish("block_keys")
    assert rig.audit(warm=WRONG) == ["warm"]
    rig.auditor.on_work()
    request = SimpleNamespace()
    uses.note(request, "features")
    rig.auditor.on_finished(request, lambda used: None)
    assert rig.counted == {("block_keys", "unavailable"): 1, ("features", "unavailable"): 1}


def test_what_has_waited_too_long_makes_room(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is busy for hours keeps no images of old requests, and audits a new one when it is free."""
    for _ in range(MOST_WAITING):
        rig.finish("block_keys")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + samples.LONGEST_WAIT_S + 1)
    rig.finish()
    assert rig.counted == {("block_keys", "cut"): MOST_WAITING}
    rig.finish("features")
    assert rig.audit(warm=RIGHT, cold=RIGHT) == ["warm", "cold"]
    assert rig.counted == {("block_keys", "cut"): MOST_WAITING, ("features", "match"): 1}


def test_only_while_the_engine_has_nothing_to_do(rig: Rig) -> None:
    rig.finish("block_keys")
    rig.engine.is_free = False
    assert rig.audit() == []
    rig.engine.is_free = True
    assert rig.audit(warm=RIGHT, cold=RIGHT) == ["warm", "cold"]


def test_it_takes_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch, no_role: None) -> None:
    rig = Rig(monkeypatch)
    monkeypatch.setattr(settings, "_current", settings.Settings(audit=1, audit_time=0.01))
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    results = []
    for _ in range(250):
        rig.auditor.on_work()
        now[0] += 1
        rig.finish("block_keys")
        rig.auditor.on_idle()
        if rig.auditor.is_asking:
            now[0] += 0.5
        for _ in range(2):
            rig.auditor.on_output(RIGHT)
        results.append(dict(rig.counted))
    assert 4 <= rig.counted["block_keys", "match"] <= 6
    assert rig.counted["block_keys", "cut"] == 250 - rig.counted["block_keys", "match"]


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_share_is_sampled(monkeypatch: pytest.MonkeyPatch, no_role: None, share: float) -> None:
    rig = Rig(monkeypatch)
    monkeypatch.setattr(settings, "_current", settings.Settings(audit=share, audit_time=100))
    for _ in range(3000):
        rig.finish("block_keys")
        rig.audit(warm=RIGHT, cold=RIGHT)
    assert 3000 * share * 0.7 <= rig.counted["block_keys", "match"] <= 3000 * share * 1.3


def test_a_request_that_used_nothing_is_no_sample(rig: Rig) -> None:
    rig.finish()
    assert rig.audit() == []
    assert not rig.counted


def test_few_wait_and_not_for_long() -> None:
    waiting = Samples()
    for number in range(MOST_WAITING):
        assert waiting.has_room(1)
        waiting.add(sample(frozenset(), 1, time_s=100.0 + number))
    assert not waiting.has_room(1)
    assert [one.time_s for one in waiting.take_old(101.5 + samples.LONGEST_WAIT_S)] == [100.0, 101.0]
    assert waiting.has_room(MOST_BYTES - 2)
    assert not waiting.has_room(MOST_BYTES - 1)
    assert len(waiting.take_all()) == 2
    assert waiting.take() is None
    assert waiting.has_room(MOST_BYTES)
