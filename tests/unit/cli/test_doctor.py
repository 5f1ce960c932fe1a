# SPDX-License-Identifier: Apache-2.0
"""How `mmcache doctor` ends."""

import logging

import pytest
import typer

from vllm_mmcache.cli import doctor, doctor_text


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("num_findings", [0, 1, 2])
def test_the_exit_status_says_whether_there_are_findings(
    num_findings: int, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{"where": "here", "seen": "a fault", "cure": "none"}] * num_findings
    monkeypatch.setattr(doctor, "examine", lambda *args, **kwargs: {"findings": found})
    monkeypatch.setattr(doctor_text, "show", lambda facts, with_settings: None)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor(None, [], as_json=as_json)
    assert ended.value.exit_code == (1 if num_findings else 0)
