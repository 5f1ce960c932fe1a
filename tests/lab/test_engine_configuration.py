# SPDX-License-Identifier: Apache-2.0
"""What `make test` runs on model runner V2, with async scheduling and without, is there and reaches other processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mmcache_tools.zoo import FIRST_FAMILIES

from tests.engine.exactness.test_exactness import CROSSING
from tests.support.engine_configuration import CHOSEN
from tests.support.left_to_matrix import LEFT, is_left, is_left_on_v2
from tests.support.synchronous import FAMILIES, SYNCHRONOUS, is_synchronous
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS

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
            test = f"tests/engine/exactness/test_exactness.py::test_equals_cold_run[{family}-main-{scenario.__name__}]"
            if not scenario.__name__.startswith("preempted") and not is_left_on_v2(test):
                assert any(f"[{family}-main-{scenario.__name__}]" in test for test in found)
    for scenario in CROSSING:
        assert any(f"-{scenario.__name__}]" in test for test in found)
    assert not any("test_families" in test for test in found)


def test_the_third_run_has_each_family_and_each_component_of_the_engine() -> None:
    """On V2 with synchronous scheduling: what is listed for it is there, all of it and nothing else."""
    listed = [node for nodes in SYNCHRONOUS.values() for node in nodes]
    assert set(SYNCHRONOUS) == {"exactness", *ENGINE_COMPONENTS}
    assert FAMILIES == FIRST_FAMILIES
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/engine"],
        env=os.environ | {"TEST_ENGINE": "v2", "TEST_MATRIX": ""},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert all(any(test.startswith(node) for test in found) for node in listed)
    assert all(is_synchronous(test) for test in found)


def test_what_is_left_to_the_matrix_is_there() -> None:
    """Each pattern is that of a file and of a test in it; parameters are not looked at."""
    for pattern in LEFT:
        path, name = pattern.replace(r"\.py", ".py").split("::", 1)
        source = (REPO / "tests" / path).read_text()
        test = re.match("test_[a-z_]*", name)
        if test is not None:
            assert f"def {test[0]}" in source, pattern
        assert is_left(f"tests/{path}::test_none") == (name == ""), pattern
    assert not is_left("tests/engine/features/test_tower_runs.py::test_the_tower_runs_once_per_image[qwen3-vl]")


def test_what_is_not_listed_is_left_to_other_runs() -> None:
    """A test's whole name counts, but where the list has a file."""
    (node, *_), (file,) = SYNCHRONOUS["block_keys"], SYNCHRONOUS["metrics"]
    assert is_synchronous(node)
    assert is_synchronous(f"{file}test_new")
    assert not is_synchronous(f"{node[:-1]}-more]")
    assert not is_synchronous(file.removesuffix("::"))


def test_variables_reach_another_process() -> None:
    code = "import os, sys; print(os.environ['VLLM_USE_V2_MODEL_RUNNER'], any('on_path' in p for p in sys.path))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(CHOSEN.runner - 1), str(CHOSEN.runner == 2)]
