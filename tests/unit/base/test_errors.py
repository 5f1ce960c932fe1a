# SPDX-License-Identifier: Apache-2.0
"""What errors of others say, in one line."""

from vllm_mmcache.base.errors import one_line


def test_one_line() -> None:
    assert one_line(ValueError("a kernel\n  could not\tbe compiled")) == "ValueError: a kernel could not be compiled"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(RuntimeError("x" * 500), 10) == "RuntimeError: " + "x" * 10
