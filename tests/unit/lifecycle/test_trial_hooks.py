# SPDX-License-Identifier: Apache-2.0
"""What a start makes of its trial, whose requests are in tests/engine/trial."""

import errno
import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.lifecycle.test_user_proofs import PLACE
from vllm_mmcache.lifecycle import trial_hooks, user_proofs
from vllm_mmcache.trial import sequence
from vllm_mmcache.trial.verdict import Verdict


def try_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: Verdict) -> None:
    """Start an engine whose trial finds this; the file of proofs is below tmp_path."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(trial_hooks, "_to_try", lambda engine_core: ["features"])
    monkeypatch.setattr(user_proofs.ProofScope, "of", lambda vllm_config: PLACE)
    monkeypatch.setattr(sequence, "Trial", lambda *args: SimpleNamespace(run=lambda: verdict))
    monkeypatch.setattr("vllm_mmcache.components.image_checkpoints.hooks.why_unneeded", lambda scheduler: "")
    engine_core: Any = SimpleNamespace(vllm_config=None, scheduler=None, log_stats=True)
    trial_hooks._try(engine_core)


def test_a_start_goes_on_where_its_proof_can_not_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    def no_lock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    try_features(monkeypatch, tmp_path, Verdict(passed=["features"]))
    assert "the next start tries this engine again" in log.text


def test_wrong_attention_is_found_again_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """A start that needs no trial would not say it. The control: with right attention, what passed is kept.

    What had been proven before it was found to be wrong is tried again, too.
    """
    for wrong in ("decode: layer 3, token 7", "", "decode: layer 3, token 7"):
        try_features(monkeypatch, tmp_path, Verdict(passed=["features"], attention_wrong=wrong))
        assert user_proofs.proven_components(PLACE) == (frozenset() if wrong else {"features"})
        assert ("Answers may be wrong, also of stock vLLM" in log.text) == bool(wrong)
        log.clear()
