# SPDX-License-Identifier: Apache-2.0
"""Commands that remove: they ask on a terminal alone, take --yes for an answer, and can say what they would do."""

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.packages import file_tier, identity, save
from tests.support.tiers import record_tier
from tests.system.cli.test_uninstall import PLACE
from vllm_mmcache.cli import app
from vllm_mmcache.components.features.tiers import key_of
from vllm_mmcache.lifecycle import user_proofs
from vllm_mmcache.storage import frame

COMMANDS = [["store", "clear"], ["uninstall"]]


class Terminal:
    """Standard input of a person."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store, and an admin key, where nothing else of ours is."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "site").mkdir()
    repair = importlib.import_module("vllm_mmcache.environment.repair")
    monkeypatch.setattr(repair, "site_packages", lambda: tmp_path / "site")
    monkeypatch.setenv("MMCACHE_STORE", str(tmp_path / "store"))
    tier = file_tier(tmp_path / "store")
    for number in (0, 1):
        assert save(tier, number)
    tier.backend.reject(key_of(identity(1)))
    kept = record_tier(tmp_path / "store")
    kept.put_many({frame.key("test", "a"): b"value"})
    kept.close()
    (tmp_path / "xdg_state_home" / "mmcache").mkdir(parents=True)
    (tmp_path / "xdg_state_home" / "mmcache" / "admin-key").write_text("key")
    return tmp_path


def files(folder: Path) -> dict[Path, int]:
    """What is in a folder, but for locks, which are no content."""
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=answer)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next command is one that a person has typed."""
    monkeypatch.setattr("vllm_mmcache.cli.store.asks", lambda yes: not yes)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_script_is_not_asked(command: list[str], home: Path) -> None:
    done = run(*command)
    assert (done.exit_code, files(home / "store")) == (0, {})
    assert "?" not in done.output


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("terminal")
def test_a_person_is_asked(command: list[str], home: Path) -> None:
    before = files(home)
    for answer in ("n\n", "\n", ""):
        refused = run(*command, answer=answer)
        assert "[y/N]" in refused.output
        assert refused.exit_code == 1  # of typer; `main` makes 130 of it
        assert files(home) == before
    assert run(*command, answer="y\n").exit_code == 0
    assert files(home / "store") == {}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["--yes", "-y"])
@pytest.mark.usefixtures("terminal")
def test_yes_is_an_answer(command: list[str], option: str, home: Path) -> None:
    done = run(*command, option)
    assert (done.exit_code, files(home / "store")) == (0, {})
    assert "[y/N]" not in done.output


def test_who_is_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_mmcache.cli import store

    assert not store.asks(False)  # as pytest runs this
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert store.asks(False)
    assert not store.asks(True)
    monkeypatch.setattr(sys, "stdin", None)
    assert not store.asks(False)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_a_dry_run_removes_nothing_and_names_what_goes(command: list[str], more: list[str], home: Path) -> None:
    before = files(home)
    done = run(*command, "--dry-run", *more)
    assert done.exit_code == 0
    assert files(home) == before
    sizes = files(home / "store").values()
    assert f"would remove {len(sizes)} files of {home / 'store'}, {sum(sizes)} bytes" in done.output
    assert ("the admin key" in done.output) is (command == ["uninstall"])
    removed = run(*command, "--yes").output
    assert f"{len(sizes)} files" in removed, "as many as were said"


def test_a_dry_run_as_json(home: Path) -> None:
    sizes = files(home / "store").values()
    done = run("store", "clear", "--dry-run", "--json")
    assert json.loads(done.stdout) == {"would_remove": len(sizes), "would_remove_bytes": sum(sizes)}
    assert json.loads(run("store", "clear", "--json").stdout) == {"removed": len(sizes)}
    assert json.loads(run("store", "clear", "--dry-run", "--json").stdout) == {
        "would_remove": 0, "would_remove_bytes": 0
    }  # fmt: skip


def test_where_nothing_is(home: Path) -> None:
    run("uninstall")
    assert run("uninstall", "--dry-run").output == "there is nothing to remove\n"


@pytest.mark.parametrize(("ttl", "budget", "some_go"), [("1h", "1GiB", True), ("0", "1GiB", False), ("0", "1", True)])
def test_a_dry_run_of_gc(ttl: str, budget: str, some_go: bool, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as then go: all packages are old, and one file is set aside."""
    monkeypatch.setenv("MMCACHE_STORE_TTL", ttl)
    monkeypatch.setenv("MMCACHE_STORE_DISK_BYTES", budget)
    for path in (home / "store" / "features").rglob("*"):
        if path.is_file() and path.name != "lock":
            os.utime(path, (1e9, 1e9))
    before = files(home)
    planned = json.loads(run("store", "gc", "--dry-run", "--json").stdout)
    assert (
        f"would remove {planned['would_remove']} files, {planned['would_remove_bytes']} bytes"
        in run("store", "gc", "--dry-run").output
    )
    assert files(home).keys() == before.keys()
    done = json.loads(run("store", "gc", "--json").stdout)
    assert planned["would_remove"] == done["evicted"]
    assert planned["records"]["would_remove"] == done["records"]["evicted"]
    gone = sum(size for path, size in before.items() if "features" in path.parts and path not in files(home))
    assert planned["would_remove_bytes"] == gone
    assert (gone > 0) is some_go


def test_what_is_forgotten_is_json(home: Path) -> None:
    for architecture in ("A", "B", "C"):
        user_proofs.add(replace(PLACE, architecture=architecture), ["features"], "test", [])
    assert json.loads(run("prove", "--forget", "2", "--dry-run", "--json").stdout) == {"would_forget": 1, "left": 2}
    assert run("prove", "--forget", "all", "--dry-run").stdout == "would forget 3 proofs\n"
    assert len(user_proofs.read()[0]) == 3
    assert json.loads(run("prove", "--forget", "2", "--json").stdout) == {"forgotten": 1, "left": 2}
    assert run("prove", "--forget", "1").stdout == "proof 1 is forgotten; 1 are left\n"
    assert json.loads(run("prove", "--forget", "all", "--json").stdout) == {"forgotten": 1, "left": 0}
    assert user_proofs.read()[0] == []


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("answer", "left"), [("n\n", 1), ("y\n", 0)])
def test_a_person_is_asked_before_proofs_go(home: Path, answer: str, left: int) -> None:
    user_proofs.add(PLACE, ["features"], "test", [])
    done = run("prove", "--forget", "all", answer=answer)
    assert "Remove 1 proofs?" in done.output
    assert len(user_proofs.read()[0]) == left
    run("prove", "--forget", "all", "--yes")
    assert user_proofs.read()[0] == []


def test_what_is_uninstalled_is_json(home: Path) -> None:
    planned = json.loads(run("uninstall", "--dry-run", "--json").stdout)["would_remove"]
    assert any("admin key" in thing for thing in planned)
    done = json.loads(run("uninstall", "--json").stdout)
    assert len(done["removed"]) == len(planned) >= 2
    assert done["left"] == []
    assert json.loads(run("uninstall", "--dry-run", "--json").stdout) == {"would_remove": []}


@pytest.mark.usefixtures("terminal")
def test_a_person_is_told_what_would_be_left(home: Path) -> None:
    (home / "store" / "features").rename(home / "elsewhere")
    (home / "store" / "features").symlink_to(home / "elsewhere")
    done = run("uninstall", answer="n\n")
    assert "would remove the admin key" in done.output
    assert f"{home / 'store'} would be left: {home / 'store' / 'features'} has mode l" in done.output
