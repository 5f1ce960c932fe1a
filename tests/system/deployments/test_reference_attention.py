# SPDX-License-Identifier: Apache-2.0
"""A server with attention=reference answers as one with a kernel does, and says that it is slow."""

from pathlib import Path

import pytest

from tests.support.deployment import Answer, deployed

pytestmark = pytest.mark.engine


def test_it_serves(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    with deployed(model, tmp_path / "log", MMCACHE_ATTENTION="reference") as server:
        assert "mmcache: attention is computed in its plainest form, which is slow" in server.log()
        for number in (0, 1, 0):
            assert server.ask(number).equals(stock[number])
        assert server.components()["features"] == ("on", "")
