# SPDX-License-Identifier: Apache-2.0
"""What comes of an error in our own code."""

import pytest

from vllm_mmcache.base.failsafe import ends_rank, failsafe


def test_bookkeeping_fails_nothing(log: pytest.LogCaptureFixture) -> None:
    with failsafe("a component of a test"):
        raise OSError("no room, says a test")
    assert "bookkeeping of a component of a test failed" in log.text


def test_a_rank_ends_with_its_error(log: pytest.LogCaptureFixture) -> None:
    """SystemExit, since vLLM catches every Exception of a worker, and drops it on most ranks."""
    with pytest.raises(SystemExit, match="mmcache: features: no room, says a test"), ends_rank("features"):
        raise OSError("no room, says a test")
    assert "features failed on this rank" in log.text
    with ends_rank("features"):
        pass
