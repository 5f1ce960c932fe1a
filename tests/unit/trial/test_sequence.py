# SPDX-License-Identifier: Apache-2.0
"""What a trial makes of what it sees; the engine is one that answers as a test says."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.base import status
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS
from vllm_mmcache.reference_attention.comparison import KINDS, PICTURE
from vllm_mmcache.trial import sequence
from vllm_mmcache.trial.sequence import Trial


class Scripted:
    """An engine that answers each question with the next probability of its first token."""

    floor = 0.01
    is_over = False
    num_requests = 0
    has_sent_counts = True
    attends_with_image_spans = True
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
        logprobs = [{1: math.log(p), 2: math.log(1 - p)}]
        return SimpleNamespace(token_ids=[1], logprobs=logprobs, tower_images=0, tower_runs=0)

    def forget_pictures(self) -> None:
        """It knows none."""


@pytest.fixture
def off() -> dict[str, str]:
    """What was switched off, and why."""
    return {}


def trial_of(
    engine: Scripted,
    off: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    components: Sequence[str] = ENGINE_COMPONENTS,
) -> Trial:
    monkeypatch.setattr(sequence, "TrialEngine", lambda *args: engine)
    prompt = SimpleNamespace(start=lambda picture: 128)
    monkeypatch.setattr(Trial, "_prompts", lambda self: (prompt, prompt, prompt))
    monkeypatch.setattr(Trial, "_stop_before", lambda self, end: end)
    return Trial(None, components, 30.0, off.__setitem__)


def test_an_engine_that_can_not_repeat_itself_passes_nothing(
    off: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times that distance would be allowed, so any answer would do."""
    verdict = trial_of(Scripted(0.9, 0.6), off, monkeypatch).run()
    assert verdict.noise == pytest.approx(0.3)
    assert verdict.passed == ["metrics"], "which compares no answers"
    assert set(verdict.untried) == set(off) == set(ENGINE_COMPONENTS) - {"metrics"}
    assert "two cold runs of this engine differ by 0.3" in off["features"]


@pytest.mark.parametrize(
    ("state", "is_ours"), [(ON, True), (ON, False), (State("unneeded", "no image attends both ways"), True)]
)
def test_wrong_attention_over_a_picture(
    off: dict[str, str], monkeypatch: pytest.MonkeyPatch, no_role: None, state: State, is_ours: bool
) -> None:
    """It switches image_spans off where that is on and attends, also if it was proven and is not on trial."""
    status.begin("engine")
    status.put("engine", "image_spans", state)
    engine = Scripted(0.9, 0.6)  # no answers are compared
    engine.attends_with_image_spans = is_ours
    engine.attention = [{"rows": dict.fromkeys(KINDS, 1), "wrong": {PICTURE: "layer 3, token 7"}, "unread": ""}]
    verdict = trial_of(engine, off, monkeypatch, ["metrics"]).run()
    assert verdict.attention_wrong == "picture: layer 3, token 7"
    assert verdict.passed == ["metrics"]
    is_blamed = state == ON and is_ours
    assert set(verdict.differed) == set(off) == ({"image_spans"} if is_blamed else set())
    if is_blamed:
        assert off["image_spans"].endswith("attention over a picture is not the naive form's: layer 3, token 7")


def test_an_answer_that_does_not_depend_on_the_picture_passes_nothing(
    off: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features of another picture would have given it, too. The control: an answer that does depend on it."""
    for elsewhere, passes in ((0.895, False), (0.8, True)):
        # Cold, cold again, with features from the store, and about another picture.
        verdict = trial_of(Scripted(0.9, 0.9, 0.9, elsewhere), off, monkeypatch, ["features"]).run()
        assert (verdict.passed == ["features"]) == passes
        assert set(verdict.untried) == (set() if passes else {"features"})
    assert "another picture moves the model's answer by 0.005, and 0.01 is allowed" in off["features"]


def test_what_was_not_compared_with_another_picture_does_not_pass(
    off: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial ends before it: here since the engine has no fourth answer."""
    verdict = trial_of(Scripted(0.9, 0.9, 0.9), off, monkeypatch, ["features"]).run()
    assert verdict.passed == []
    assert set(verdict.untried) == set(off) == {"features"}
