# SPDX-License-Identifier: Apache-2.0
"""Every scenario runs on every engine, also where a run on V1 leaves to V2 what both could run."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.every_engine)
