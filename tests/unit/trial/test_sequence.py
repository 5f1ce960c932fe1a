# SPDX-License-Identifier: Apache-2.0
"""What a trial makes of what it sees; the engine is one that answers as a test says."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.trial import sequence
from vllm_mmcache.trial.sequence import TRIABLE, Trial


class Scripted:
    """An engine that answers each question with the next probability of its first token."""

    floor = 0.01
    is_over = False
    num_requests = 0
    has_sent_counts = True
    core = SimpleNamespace(log_stats=True)

    def __init__(self, *probabilities: float) -> None:
        self._probabilities = list(probabilities)
        self.attention: list[dict[str, Any]] = []

    @contextmanager
    def leaving_nothing(self, *args: Any) -> Iterator[None]:
        yield

    without_checkpoints = comparing_attention = leaving_nothing

    def salt(self, name: str) -> str:
        return name

    def ask(self, *args: Any, **kwargs: Any) -> Any:
        p = self._probabilities.pop(0)
        return SimpleNamespace(token_ids=[1], logprobs=[{1: math.log(p), 2: math.log(1 - p)}])


@pytest.fixture
def off() -> dict[str, str]:
    """What was switched off, and why."""
    return {}


def trial_of(engine: Scripted, off: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Trial:
    monkeypatch.setattr(sequence, "TrialEngine", lambda *args: engine)
    prompt = SimpleNamespace(start=lambda picture: 128)
    monkeypatch.setattr(Trial, "_prompts", lambda self: (prompt, prompt, prompt))
    monkeypatch.setattr(Trial, "_stop_before", lambda self, end: end)
    return Trial(None, TRIABLE, 30.0, off.__setitem__)


def test_an_engine_that_can_not_repeat_itself_passes_nothing(
    off: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times that distance would be allowed, so any answer would do."""
    verdict = trial_of(Scripted(0.9, 0.6), off, monkeypatch).run()
    assert verdict.noise == pytest.approx(0.3)
    assert verdict.passed == ["metrics"], "which compares no answers"
    assert set(verdict.untried) == set(off) == set(TRIABLE) - {"metrics"}
    assert "two cold runs of this engine differ by 0.3" in off["features"]
