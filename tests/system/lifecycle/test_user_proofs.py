# SPDX-License-Identifier: Apache-2.0
"""Several processes that write the user's proofs at once lose nothing."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.lifecycle.test_user_proofs import PLACE, add
from vllm_mmcache.lifecycle import user_proofs


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mmcache" / "proofs.json"


def _add_many(device: str) -> None:
    for number in range(10):
        add(replace(PLACE, device=device, runner=number))


@pytest.mark.process
def test_several_at_once_lose_nothing() -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_add_many, args=(f"{n}",)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(user_proofs.read()[0]) == 40
