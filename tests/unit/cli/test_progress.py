# SPDX-License-Identifier: Apache-2.0
"""A terminal sees that a command works; a file sees nothing of it."""

import io
import sys

import pytest

from vllm_mmcache.cli.progress import working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_terminal_alone_sees_it(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", file := kind())
    with working("reading everything"):
        pass
    assert ("reading everything" in file.getvalue()) == (kind is Terminal)
