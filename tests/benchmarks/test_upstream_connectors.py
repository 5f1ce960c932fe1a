# SPDX-License-Identifier: Apache-2.0
"""The page shows the committed comparison with vLLM's own connectors, and what is said there of their faults is so."""

import json

import pytest

from benchmarks.upstream_connectors import compare, page


def test_the_page_shows_the_committed_result() -> None:
    shown = page.PAGE.read_text()
    assert page.written(shown) == shown, "run: python -m benchmarks.upstream_connectors.page --write"
    with pytest.raises(ValueError, match="lacks the marks"):
        page.written("no marks")


def test_the_comparison_is_one() -> None:
    """Stock must have left its own cache, or rotation says nothing; a fault that upstream mends changes the page."""
    found = json.loads(page.COMMITTED.read_text())
    images = found["options"]["images"]
    assert set(compare.SIDES) <= set(found)
    assert [found["stock"][name]["tower_runs"] for name in ("first", "rotation", "restart")] == [images] * 3
    assert [found["mmcache"][name]["tower_runs"] for name in ("first", "rotation", "restart")] == [images, 0, 0]
    assert found["ECCPUConnector"]["restart"]["tower_runs"] == images
    ours, theirs = found["mmcache"]["faults"], found["ECCPUConnector"]["faults"]
    assert min(ours["changed_weights"], theirs["changed_weights"]) > 0
    assert (ours["tower_runs_after_new_weights"], theirs["tower_runs_after_new_weights"]) == (1, 0)
    assert ours["known_beside_new"].startswith("answered")
    assert theirs["known_beside_new"].startswith("RuntimeError: Encoder cache miss")
