# SPDX-License-Identifier: Apache-2.0
"""The user's proofs: each bad file and entry is ignored with its line, and a good file is used."""

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_mmcache import __version__
from vllm_mmcache.base.errors import ProofsUnwritable
from vllm_mmcache.lifecycle import user_proofs
from vllm_mmcache.lifecycle.user_proofs import ProofScope

PLACE = ProofScope(
    "0.33.0", "cuda", 2, "async", "2.14.0", __version__, "NVIDIA H100", "Qwen3VLForConditionalGeneration", 1, 1
)
COMPONENT_NAMES = ("block_keys", "features")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mmcache" / "proofs.json"


def add(place: ProofScope = PLACE, *components: str, **more: Any) -> None:
    user_proofs.add(place, components or COMPONENT_NAMES, "zoo family qwen3-vl", ["--block-size", "32"], **more)


def changed(state: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write the good file with a change."""
    whole = json.loads(state.read_text())
    change(whole)
    state.write_text(json.dumps(whole))


def test_a_good_file_is_used(state: Path) -> None:
    assert (user_proofs.read(), user_proofs.proven_components(PLACE)) == (([], []), frozenset())
    add()
    (proof,), lines = user_proofs.read()
    assert lines == []
    assert (proof.place, proof.components, proof.arguments) == (PLACE, COMPONENT_NAMES, ("--block-size", "32"))
    assert proof.how == "zoo family qwen3-vl"
    assert proof.when.endswith("+00:00")
    assert user_proofs.proven_components(PLACE) == frozenset(COMPONENT_NAMES)
    assert user_proofs.why_passed_over(PLACE) == []
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", [field.name for field in fields(ProofScope) if field.name != "configuration"])
def test_it_holds_for_one_place_alone(name: str) -> None:
    add()
    value = getattr(PLACE, name)
    change: dict[str, Any] = {name: value + 1 if isinstance(value, int) else f"{value}+other"}
    other = replace(PLACE, **change)
    assert user_proofs.proven_components(other) == frozenset()
    assert user_proofs.proven_components(PLACE) == frozenset(COMPONENT_NAMES)


def test_what_is_passed_over_is_said() -> None:
    add(replace(PLACE, vllm="0.32.0", device="NVIDIA A100"), "features")
    assert user_proofs.why_passed_over(PLACE) == [
        "a proof of features for vLLM 0.32.0, device NVIDIA A100 does not hold for vLLM 0.33.0, device NVIDIA H100: "
        "run `mmcache prove` again"
    ]
    add(replace(PLACE, mmcache="0.0.1", runner=1), "metrics")
    assert "of metrics for model runner V1, mmcache 0.0.1 does not" in user_proofs.why_passed_over(PLACE)[1]
    add(replace(PLACE, architecture="Gemma3ForConditionalGeneration", device="other"))
    assert len(user_proofs.why_passed_over(PLACE)) == 2, "another model's"
    add(PLACE, "features", "metrics")
    assert user_proofs.why_passed_over(PLACE) == [], "proven again"


def test_what_a_file_says_reaches_no_terminal_as_it_is() -> None:
    add(replace(PLACE, device="\x1b[2J\ud800 GPU"))
    (line,) = user_proofs.why_passed_over(PLACE)
    assert "device \\x1b[2J\\ud800 GPU does not" in line


def spoil_text(text: bytes) -> Callable[[Path], Any]:
    return lambda state: state.write_bytes(text)


def whole_is(**change: Any) -> Callable[[Path], Any]:
    return lambda state: changed(state, lambda whole: whole.update(change))


def link(state: Path) -> None:
    state.rename(state.with_name("elsewhere"))
    state.symlink_to(state.with_name("elsewhere"))


def folder(state: Path) -> None:
    state.unlink()
    state.mkdir()


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (lambda state: state.write_bytes(state.read_bytes()[:-20]), "it is not JSON (Expecting"),
    "empty": (spoil_text(b""), "it is not JSON"),
    "binary": (spoil_text(b"\xff\xfe\x00rubbish"), "it is not JSON"),
    "endless number": (spoil_text(b"9" * 10_000), "it is not JSON"),
    "deep": (spoil_text(b"[" * 100_000), "it is not JSON"),
    "foreign": (spoil_text(b'{"proofs": []}'), "`mmcache prove` has not written it"),
    "a list": (spoil_text(b"[]"), "`mmcache prove` has not written it"),
    "no list": (whole_is(proofs={}), "`mmcache prove` has not written it"),
    "another format": (whole_is(format=2), f"it has format '2', mmcache {__version__} writes 1"),
    "group may write": (lambda state: state.chmod(0o620), "others may write it (-rw--w----)"),
    "others may write": (lambda state: state.chmod(0o602), "others may write it (-rw-----w-)"),
    "folder": (lambda state: state.parent.chmod(0o777), "could have put it there: chmod 700"),
    "link": (link, "it is a symbolic link"),
    "directory": (folder, "it is no file (d"),
    "huge": (lambda state: state.write_bytes(b" " * (user_proofs._MAX_BYTES + 1)), "more than proofs need: remove it"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_ignored_with_a_line(name: str, state: Path) -> None:
    add()
    spoil, words = BAD[name]
    spoil(state)
    found, (line,) = user_proofs.read()
    assert found == []
    assert line.startswith(f"{state} is ignored: ")
    assert words in line
    assert user_proofs.proven_components(PLACE) == frozenset()
    if name == "directory":
        return
    add(PLACE, "metrics")  # the old one is set aside
    assert user_proofs.read()[1] == []
    assert "metrics" in user_proofs.proven_components(PLACE)


def test_another_users_file_is_ignored(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add()
    user = os.geteuid()
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: user + 1)
        assert f"owner {user}, so others than user {user + 1}" in user_proofs.read()[1][0]
    if user:
        return
    os.chown(state, 1234, 1234)  # where the tests run as root
    assert "it belongs to user 1234, not to 0" in user_proofs.read()[1][0]
    assert user_proofs.proven_components(PLACE) == frozenset()


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.pop("when"),
        lambda entry: entry.update(components="features"),
        lambda entry: entry.update(components=[1]),
        lambda entry: entry.update(components=[]),
        lambda entry: entry.update(arguments=None),
        lambda entry: entry.update(extra=1),
        lambda entry: entry.update(how=None),
        lambda entry: entry["place"].pop("device"),
        lambda entry: entry["place"].update(runner="2"),
        lambda entry: entry["place"].update(runner=True),
        lambda entry: entry["place"].update(vllm=None),
        lambda entry: entry.update(place=[]),
    ],
)
def test_a_bad_entry_is_ignored_and_others_are_used(change: Callable[[dict[str, Any]], Any], state: Path) -> None:
    add()
    add(replace(PLACE, runner=1))
    changed(state, lambda whole: change(whole["proofs"][0]))
    (good,), (line,) = user_proofs.read()
    assert good.place.runner == 1
    assert line.startswith(f"entry 1 of {state} is ignored: it is not as `mmcache prove` writes it")
    add(replace(PLACE, runner=1, device="new"))
    assert len(json.loads(state.read_text())["proofs"]) == 3, "nobody's entry is thrown away"


def test_an_unknown_component_is_ignored(state: Path) -> None:
    add()
    changed(state, lambda whole: whole["proofs"][0].update(rooms=["features", "time\x1b[2J travel"]))
    (proof,), (line,) = user_proofs.read()
    assert proof.components == ("features",)
    assert f"no component of mmcache {__version__}: 'time\\x1b[2J travel', which is ignored" in line
    with pytest.raises(ValueError, match="no components of the engine: identity"):
        add(PLACE, "identity")


def test_a_failure_takes_back_what_was_proven_there(state: Path) -> None:
    add()
    add(replace(PLACE, runner=1))
    user_proofs.add(PLACE, ["metrics"], "own model /m", [], failed=["features"])
    assert user_proofs.proven_components(PLACE) == {"block_keys", "metrics"}
    assert user_proofs.proven_components(replace(PLACE, runner=1)) == frozenset(COMPONENT_NAMES)
    user_proofs.add(PLACE, [], "own model /m", [], failed=["block_keys", "metrics"])
    assert user_proofs.proven_components(PLACE) == frozenset()
    assert [proof.place.runner for proof in user_proofs.read()[0]] == [1]


@pytest.mark.parametrize(("proven_for", "failed_for"), [("0123", ""), ("", "0123"), ("none", "0123"), ("none", "")])
def test_a_failure_takes_back_what_covers_it_or_is_covered(state: Path, proven_for: str, failed_for: str) -> None:
    """`mmcache prove` writes proofs of any configuration, and a trial those of one; older files name none."""
    here = replace(PLACE, configuration="0123")
    add(replace(PLACE, configuration=proven_for.replace("none", "")))
    if proven_for == "none":
        changed(state, lambda whole: whole["proofs"][0]["place"].pop("configuration"))
    add(replace(PLACE, configuration="4567"))
    assert user_proofs.proven_components(here) == set(COMPONENT_NAMES)
    user_proofs.add(replace(PLACE, configuration=failed_for), [], "a test", [], failed=["features"])
    assert user_proofs.proven_components(here) == {"block_keys"}
    other = user_proofs.proven_components(replace(PLACE, configuration="4567"))
    assert ("features" in other) == (failed_for == "0123"), "of another configuration than the one that failed"


def test_the_same_proof_again_takes_the_old_ones_place() -> None:
    add()
    add(PLACE, "features")
    assert [proof.components for proof in user_proofs.read()[0]] == [("block_keys",), ("features",)]
    assert user_proofs.proven_components(PLACE) == set(COMPONENT_NAMES), "block_keys was not tried this time"
    add()
    assert [proof.components for proof in user_proofs.read()[0]] == [COMPONENT_NAMES]
    user_proofs.add(PLACE, ["metrics"], "own model /m", [])
    assert user_proofs.proven_components(PLACE) == {*COMPONENT_NAMES, "metrics"}


def test_forgetting(state: Path) -> None:
    for runner in (1, 2, 3):
        add(replace(PLACE, runner=runner))
    changed(state, lambda whole: whole["proofs"].insert(0, "no proof"))
    for wrong in (0, 4, -1):
        with pytest.raises(IndexError):
            user_proofs.forget(wrong)
    assert user_proofs.forget(2) == 1
    assert [proof.place.runner for proof in user_proofs.read()[0]] == [1, 3]
    assert user_proofs.forget() == 2
    assert not state.exists()
    assert user_proofs.forget() == 0


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/state"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert user_proofs.path() == tmp_path / ".local" / "state" / "mmcache" / "proofs.json"
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert user_proofs.read() == ([], []), "where there is no home, there is no file"
    with pytest.raises(ProofsUnwritable, match="set XDG_STATE_HOME"):
        add()


def test_a_folder_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ProofsUnwritable, match="can't be written"):
        add()
    assert "it can't be read" in user_proofs.read()[1][0]


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    def no_lock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProofsUnwritable, match=r"can't be written: .*: set XDG_STATE_HOME"):
        add()
    assert len(os.listdir("/proc/self/fd")) == files
    assert not state.exists()


def test_a_proof_of_a_configuration_holds_for_that_one_alone() -> None:
    """One without holds for any, as those of earlier states do, whose files do not name it."""
    here = replace(PLACE, configuration="0123456789abcdef")
    assert PLACE.covers(here)
    assert here.covers(here)
    assert not here.covers(replace(here, configuration="fedcba9876543210"))
    assert not here.covers(PLACE)
    assert not PLACE.covers(replace(here, device="another"))
    user_proofs.add(here, ["features"], "a test", [])
    assert user_proofs.proven_components(here) == {"features"}
    assert user_proofs.proven_components(PLACE) == frozenset()
    user_proofs.forget()
    user_proofs.add(PLACE, ["features"], "a test", [])
    content = json.loads(user_proofs.path().read_text())
    del content["proofs"][0]["place"]["configuration"]
    user_proofs.path().write_text(json.dumps(content))
    assert user_proofs.proven_components(here) == {"features"}
