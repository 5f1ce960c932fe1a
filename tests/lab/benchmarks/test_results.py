# SPDX-License-Identifier: Apache-2.0
"""A committed result can be repeated: it names the commit that it was measured on, and holds no raw data."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results, run
from benchmarks.results import Result

MOST_NUMBERS = 25  # in one list: chaos has the time of each of its 21 starts
MOST_BYTES = 100_000  # of a result: the largest one, of processor, has 62,825 of medians and counters

COMMITTED = sorted(results.FOLDER.glob("*.json"))


def members(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that a result holds, at any depth, with its key."""
    yield key, content
    if isinstance(content, dict):
        for name, member in content.items():
            yield from members(member, name)
    elif isinstance(content, list):
        for member in content:
            yield from members(member)


def commits(content: Any) -> list[str]:
    """Every commit that a result names: its own, and those of its parts."""
    return [member for key, member in members(content) if key in ("commit", "plugin_commit")]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_result_names_its_commit(path: Path) -> None:
    """The whole result does, or, in the result of the soak test, each part."""
    content = json.loads(path.read_text())
    parts = list(content.values()) if path.stem == "soak" else [content]
    assert parts
    assert all(part["commit"] and part["machine"] and part["command"] for part in parts)


def test_committed_results_are_of_clean_trees() -> None:
    """A result of files that differ from its commit can't be repeated from the commit alone."""
    named = {path.stem: commits(json.loads(path.read_text())) for path in COMMITTED}
    changed = {name for name, found in named.items() if any(commit.endswith("+") for commit in found)}
    assert not changed, "measured on files that differ from the commit: commit, and save them again"


@pytest.mark.process
def test_the_commits_of_results_are_there() -> None:
    """A benchmark whose commit this repository has not can only be repeated at another one."""
    try:
        is_shallow = git(results.ROOT, "rev-parse", "--is-shallow-repository").strip() == "true"
    except subprocess.CalledProcessError:
        pytest.skip("not a clone")
    if is_shallow:
        pytest.skip("a clone without its history")
    named = {path.stem: {one.rstrip("+") for one in commits(json.loads(path.read_text()))} for path in COMMITTED}
    asked = sorted({commit for found in named.values() for commit in found})
    command = ["git", "cat-file", "--batch-check=%(objectname) %(objecttype)"]
    done = subprocess.run(command, cwd=results.ROOT, input="\n".join(asked), capture_output=True, text=True, check=True)
    known = {commit for commit, said in zip(asked, done.stdout.splitlines(), strict=True) if said.endswith(" commit")}
    lost = {name for name, found in named.items() if not found <= known}
    assert not lost, "measured at a commit that was not kept: save them again"


def test_the_last_traceback_is_what_went_wrong() -> None:
    """Of several, and without what a library says when the process ends."""
    text = "Traceback (most recent call last):\n  File 1\nKeyError: 1\n\nDuring handling:\n"
    last = "Traceback (most recent call last):\n[rank0]:   File 2\n[rank0]:     call()\n[rank0]: OSError: no room"
    assert results.last_traceback(f"{text}{last}\nnanobind: leaked 64 types!\n - leaked\n") == last
    assert results.last_traceback("killed") == "killed"


def test_a_part_of_a_changed_tree_is_seen() -> None:
    content = {"commit": "abc", "details": {"part": {"commit": "def+"}, "plugin_commit": "fed"}}
    assert commits(content) == ["abc", "def+", "fed"]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_result_has_no_raw_data(path: Path) -> None:
    """What is committed is medians, sums and counts, not a number for each request."""
    listed = [len(member) for _, member in members(json.loads(path.read_text())) if isinstance(member, list)]
    assert max(listed, default=0) <= MOST_NUMBERS
    assert path.stat().st_size <= MOST_BYTES


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgSign=false")
    return subprocess.run(["git", *author, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in the place of the project's, with a file and a result in its only commit."""
    for name in ("BENCH_COMMIT", "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "project"
    folder = root / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (root / "code.py").write_text("")
    (folder / "load.json").write_text("{}")
    git(tmp_path, "init", "--quiet", str(root))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=first")
    monkeypatch.setattr(results, "ROOT", root)
    monkeypatch.setattr(results, "FOLDER", folder)
    return root


@pytest.mark.process
def test_what_differs_from_the_commit(project: Path) -> None:
    named = git(project, "rev-parse", "--short", "HEAD").strip()
    assert (results.commit(), results.why_not_to_commit()) == (named, "")
    (project / "benchmarks" / "results" / "load.json").write_text("[]")
    (project / "benchmarks" / "results" / "soak.json").write_text("{}")
    assert (results.commit(), results.why_not_to_commit()) == (named, ""), "results may differ"
    (project / "new.py").write_text("")
    assert results.commit() == named, "as git describes it"
    assert results.why_not_to_commit() == "files differ from the commit: new.py"
    (project / "code.py").write_text("changed = True")
    assert results.commit() == f"{named}+"
    for number in range(results.NUM_NAMED):
        (project / f"one {number}.py").write_text("")
    reason = results.why_not_to_commit()
    assert reason.startswith("files differ from the commit: code.py, new.py, ")
    assert reason.endswith(" and 2 more")


@pytest.mark.process
def test_the_last_change_of_some_files(project: Path) -> None:
    """What else the project has may change."""
    assert results.last_change("nothing.py") == ""
    named = git(project, "rev-parse", "--short", "HEAD").strip()
    (project / "new.py").write_text("")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--message=second")
    (project / "new.py").write_text("changed = True")
    assert results.last_change("code.py", "benchmarks") == named
    assert results.last_change("code.py", "new.py") == git(project, "rev-parse", "--short", "HEAD").strip() + "+"
    (project / "benchmarks" / "more.py").write_text("")
    assert results.last_change("code.py", "benchmarks") == f"{named}+", "a file of nobody's may be what differs"


@pytest.mark.process
def test_where_the_commit_is_not_known(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    elsewhere, fresh = tmp_path / "elsewhere", tmp_path / "fresh"
    elsewhere.mkdir()
    git(tmp_path, "init", "--quiet", str(fresh))
    for folder in (elsewhere, fresh):
        assert results.commit(folder) == ""
        assert results.why_not_to_commit(folder) == f"git knows no commit of {folder}"
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    assert results.why_not_to_commit(elsewhere) == "", "files without a repository"
    (project / "new.py").write_text("")
    assert "new.py" in results.why_not_to_commit(), "it does not excuse a changed tree"
    monkeypatch.setenv("BENCH_COMMIT", "abc+")
    assert "a changed tree: abc+" in results.why_not_to_commit(elsewhere)
    monkeypatch.delenv("BENCH_COMMIT")
    monkeypatch.setenv("PATH", str(elsewhere))
    assert "git knows no commit" in results.why_not_to_commit(), "no git"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The benchmarks that were run, none of which measures anything."""
    names: list[str] = []

    def measure_of(name: str) -> Any:
        return lambda options: names.append(name) or Result()

    monkeypatch.setattr(run, "measure_of", measure_of)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return names


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `python -m benchmarks.run load` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["run", "load", *arguments])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.process
def test_a_changed_tree_is_not_saved(
    project: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured; --output writes the result all the same, but not among the committed ones."""
    (project / "code.py").write_text("changed = True")
    for arguments in (["--save"], ["--output", str(results.FOLDER)]):
        assert call(monkeypatch, *arguments) == 2
        said, advice = capsys.readouterr().err.splitlines()
        assert said == "error: files differ from the commit: code.py."
        assert advice == "Commit first, or use --output DIRECTORY instead of --save."
    assert measured == []
    assert (results.FOLDER / "load.json").read_text() == "{}"
    assert call(monkeypatch, "--output", str(project / "mine")) == 0
    assert measured == ["load"]
    assert json.loads((project / "mine" / "load.json").read_text())["commit"].endswith("+")


@pytest.mark.process
def test_a_clean_tree_is_saved_twice(project: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of the first run, which is not yet committed, is nothing against the second."""
    for _ in range(2):
        assert call(monkeypatch, "--save") == 0
    assert measured == ["load", "load"]
    named = git(project, "rev-parse", "--short", "HEAD").strip()
    assert json.loads((results.FOLDER / "load.json").read_text())["commit"] == named
