# SPDX-License-Identifier: Apache-2.0
"""What every command line has: a version, help, completion of a shell, and one way to say what went wrong."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import vllm_mmcache
from vllm_mmcache.cli import app, is_json_asked, main


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_the_version() -> None:
    assert run("--version") == (0, f"mmcache {vllm_mmcache.__version__}\n")


def verbs() -> list[list[str]]:
    """The command itself, and all below it."""

    def below(command: Any, words: list[str]) -> Iterator[list[str]]:
        yield words
        for name, inner in getattr(command, "commands", {}).items():
            yield from below(inner, [*words, name])

    return list(below(typer.main.get_command(app), []))


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_help_under_both_names_is_whole_at_80_columns(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, shown = run(*verb, "-h")
    assert (code, shown) == run(*verb, "--help")
    assert code == 0
    assert max(map(len, shown.splitlines())) <= 80
    assert not is_cut(shown)


def is_cut(shown: str) -> bool:
    return "…" in shown or re.search(r"\w\.\.\.$", shown, re.MULTILINE) is not None


def test_help_that_is_cut_is_noticed() -> None:
    """Negative control: typer cuts what it takes from a long docstring for the list of commands."""
    other = typer.Typer(rich_markup_mode=None)
    for name in ("one", "two"):
        other.command(name, help="A word and another " * 20 + "end.")(lambda: None)
    assert is_cut(CliRunner().invoke(other, ["--help"], env={"COLUMNS": "80"}).output)


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """What a command that ends with status 2 prints, as users start it."""
    monkeypatch.setattr(sys, "argv", ["mmcache", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    return printed.out, printed.err


NOT_DONE = {
    "no such file": ["estimate", "none.jsonl"],
    "no such option": ["estimate", "none.jsonl", "--no-such-option"],
    "no such record": ["explain", "--file", "none.jsonl"],
    "contradiction": ["explain", "--file", "none.jsonl", "--url", "http://127.0.0.1"],
    "no store": ["store", "ls", "--dir", "none"],
    "nothing to clear": ["store", "clear", "--dir", "none"],
    "no proof": ["prove", "--forget", "x"],
    "no pictures": ["store", "warm", "some/model"],
    "the model is missing": ["doctor", "--no-such-option"],
}


@pytest.mark.parametrize("name", NOT_DONE)
def test_an_error_is_json_where_json_was_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = fails(monkeypatch, capsys, *NOT_DONE[name], "--json")
    found = json.loads(out)
    assert list(found) == ["error"]
    assert err == f"error: {found['error']}\n"
    out, err = fails(monkeypatch, capsys, *NOT_DONE[name])
    assert (out, err) == ("", f"error: {found['error']}\n")


def test_what_is_for_vllm_asks_for_no_json() -> None:
    assert is_json_asked(["prove", "--json", "--", "-tp", "2"])
    assert not is_json_asked(["prove", "--", "--json"])


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["expalin"], "'explain'"),
        (["store", "cler"], "'clear'"),
        (["estimate", "log", "--modle", "x"], "--model"),
        (["store", "clear", "--dryrun"], "--dry-run"),
        (["uninstall", "--yse"], "--yes"),
        (["--verson"], "--version"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_one_that_is_meant(
    arguments: list[str], meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = fails(monkeypatch, capsys, *arguments)
    assert "Did you mean" in err
    assert meant in err.partition("Did you mean")[2]


@pytest.mark.parametrize("arguments", [["qqqqqq"], ["estimate", "log", "--qqqqqq"]])
def test_nothing_is_guessed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = fails(monkeypatch, capsys, *arguments)
    assert "qqqqqq" in err
    assert "Did you mean" not in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, shown = run("--show-completion", shell)
    assert code == 0
    assert "_MMCACHE_COMPLETE" in shown
