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


def test_a_start_goes_on_where_its_proof_can_not_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    def no_lock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", no_lock)
    monkeypatch.setattr(trial_hooks, "_to_try", lambda engine_core: ["features"])
    monkeypatch.setattr(user_proofs.ProofScope, "of", lambda vllm_config: PLACE)
    trial = SimpleNamespace(run=lambda: Verdict(passed=["features"]))
    monkeypatch.setattr(sequence, "Trial", lambda *args: trial)
    scheduler = SimpleNamespace(kv_cache_manager=None)
    engine_core: Any = SimpleNamespace(vllm_config=None, scheduler=scheduler, log_stats=True)
    monkeypatch.setattr("vllm_mmcache.components.image_checkpoints.hooks.why_unneeded", lambda scheduler: "")
    trial_hooks._try(engine_core)
    assert "the next start tries this engine again" in log.text
