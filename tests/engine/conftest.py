# SPDX-License-Identifier: Apache-2.0
"""Every test of this folder is about answers. A Valkey server, and settings in force for one test."""

import pytest

from tests.support.store_server import alone, put, running_server, server

__all__ = ["alone", "put", "running_server", "server"]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.answers)
