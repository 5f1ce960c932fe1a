# SPDX-License-Identifier: Apache-2.0
"""The list of seeded faults fits the package and its tests, and what plants them tells apart what tests notice."""

import ast
import subprocess
from pathlib import Path

import pytest

from scripts import seeded_faults
from scripts.seeded_faults import REPO, Copy, Fault, Outcome

FAULTS = seeded_faults.faults()
CONTRACT = REPO / "tests" / "support" / "storage_contract.py"  # tests that files of backends derive from
SOURCE = "def double(number: int) -> int:\n    return 2 * number\n"


def fault(**changes: str) -> Fault:
    given = {"id": "a", "file": "package/code.py", "old": "2 * number", "new": "3 * number", "fault": "", "breaks": ""}
    return Fault(**{**given, **changes}, first="none", tests=("test_code.py",))


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: str(one.id))
def test_a_fault_can_be_planted(one: Fault) -> None:
    """In the package, where its text stands exactly once, and so that the file is Python still."""
    assert one.file.startswith("vllm_mmcache/")
    source = (REPO / one.file).read_text()
    planted = one.planted_in(source)
    assert planted != source
    compile(planted, one.file, "exec")


@pytest.mark.parametrize("count", [0, 2])
def test_a_fault_whose_text_is_not_there_or_stands_twice_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"stands {count} times"):
        fault().planted_in(count * SOURCE)


def test_the_tests_of_each_fault_are_there() -> None:
    for one in FAULTS:
        assert one.tests, one.id
        for test in one.tests:
            path, *_, name = test.split("::")
            files = (REPO / path, CONTRACT) if test.count("::") > 1 else (REPO / path,)
            nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
            assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, test


def test_no_two_faults_have_one_id() -> None:
    ids = [one.id for one in FAULTS]
    assert len(ids) == len(set(ids)) >= 60


def test_the_page_is_of_the_list() -> None:
    """All but what was noticed by which test, which a run says."""
    written = seeded_faults.PAGE.read_text().splitlines()
    made = seeded_faults.page(Outcome(one, "killed", "::") for one in FAULTS).splitlines()
    cut = [[line.rpartition(" | ")[0] or line for line in page] for page in (written, made)]
    assert cut[0] == cut[1], 'run: make seeded-faults ARGS="--save"'


@pytest.mark.process
def test_what_becomes_of_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tree of its own: one that a test notices, one that none does, one that can't be imported; in this order."""
    tree = tmp_path / "tree"
    (tree / "package").mkdir(parents=True)
    (tree / "package" / "__init__.py").touch()
    (tree / "package" / "code.py").write_text(SOURCE)
    (tree / "test_code.py").write_text(
        "import pytest\nfrom package.code import double\n"
        "@pytest.mark.parametrize('number', [0, 4])\ndef test_double(number): assert double(number) == 2 * number\n"
    )
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    monkeypatch.setattr(seeded_faults, "REPO", tree)
    copy = Copy(tmp_path / "copy")
    broken = fault(old="def double", new="import nothing_of_that_name\n\n\ndef double")
    outcomes = [copy.outcome(one, one.tests) for one in (fault(), fault(new="number * 2"), broken)]
    assert [(one.state, one.test) for one in outcomes] == [
        ("killed", "test_code.py::test_double"),
        ("survived", ""),
        ("broken", ""),
    ]
    assert (copy.root / "package" / "code.py").read_text() == SOURCE
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        copy.outcome(fault(), ["test_of_no_file.py"])
