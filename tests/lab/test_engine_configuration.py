# SPDX-License-Identifier: Apache-2.0
"""What `make test` runs on model runner V2 with async scheduling is there, and reaches other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mmcache_tools.zoo import FIRST_FAMILIES

from tests.engine.exactness.test_exactness import CROSSING
from tests.support.engine_configuration import CHOSEN

pytestmark = pytest.mark.process

REPO = Path(__file__).parents[2]


def test_the_second_run_has_all_first_families_and_crosses_each_cache() -> None:
    """It is a part of all tests, and would be no failure if it were empty."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/engine/exactness"],
        env=os.environ | {"TEST_ENGINE": "v2-async", "TEST_MATRIX": ""},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    for family in FIRST_FAMILIES:
        assert any(f"test_wrong_picture_is_detected[{family}]" in test for test in found)
        for scenario in CROSSING:
            if not scenario.__name__.startswith("preempted"):
                assert any(f"[{family}-main-{scenario.__name__}]" in test for test in found)
    for scenario in CROSSING:
        assert any(f"-{scenario.__name__}]" in test for test in found)
    assert not any("test_families" in test for test in found)


def test_variables_reach_another_process() -> None:
    code = "import os, sys; print(os.environ['VLLM_USE_V2_MODEL_RUNNER'], any('on_path' in p for p in sys.path))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(CHOSEN.runner - 1), str(CHOSEN.runner == 2)]
