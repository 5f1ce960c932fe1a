# SPDX-License-Identifier: Apache-2.0
"""No test of this folder starts a process or an engine: one that is marked so is refused, one that does so fails."""

from collections.abc import Generator

import pytest

from tests.conftest import starts
from tests.support.no_processes import no_processes


def pytest_itemcollected(item: pytest.Item) -> None:
    if starts(item):
        raise pytest.UsageError(f"{item.nodeid} starts a process or an engine: move it to tests/system or tests/engine")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with no_processes():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with no_processes():
        return (yield)
