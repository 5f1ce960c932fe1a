# SPDX-License-Identifier: Apache-2.0
"""A fork with our patches: what vLLM does itself there is not needed, and the report of a running server says so."""

from pathlib import Path

import pytest

from tests.support.deployment import Answer, deployed
from tests.support.sizes import larger
from tests.support.vllm_tree import apply, copy_installed

pytestmark = pytest.mark.engine


@larger
def test_a_fork_with_our_patches(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    tree = copy_installed(tmp_path / "fork")
    assert apply(tree).returncode == 0
    with deployed(model, tmp_path / "log", paths=[tree]) as server:
        components = server.components()
        own = {
            component
            for component, (state, why) in components.items()
            if state == "unneeded" and "vLLM has its own: " in why
        }
        assert {"resumed_images", "image_checkpoints", "lazy_media"} <= own
        assert components["image_extraction"] == ("off", "needs lazy_media, which is unneeded")
        assert components["identity"] == components["features"] == components["block_keys"] == ("on", "")
        assert server.ask(0).equals(stock[0])
        assert server.ask(0).equals(stock[0])
        assert server.ask(1).equals(stock[1])
