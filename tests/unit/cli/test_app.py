# SPDX-License-Identifier: Apache-2.0
"""What every command line has: a version, help under both names, and completion of a shell."""

import pytest
from typer.testing import CliRunner

import vllm_mmcache
from vllm_mmcache.cli import app


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_the_version() -> None:
    assert run("--version") == (0, f"mmcache {vllm_mmcache.__version__}\n")


@pytest.mark.parametrize("verb", [[], ["explain"], ["estimate"], ["store"], ["store", "ls"]])
def test_help_under_both_names(verb: list[str]) -> None:
    code, shown = run(*verb, "-h")
    assert (code, shown) == run(*verb, "--help")
    assert code == 0
    assert "…" not in shown, "cut off"
    assert "..." not in shown.replace("[ARGS]...", "").replace("{LOG}...", "").replace("(chatcmpl-...)", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, shown = run("--show-completion", shell)
    assert code == 0
    assert "_MMCACHE_COMPLETE" in shown
