# SPDX-License-Identifier: Apache-2.0
"""The server of the feature store's tests, and no records of one test in another."""

from collections.abc import Iterator

import pytest

from tests.features.conftest import running_server, server
from vllm_mmcache.storage import records

__all__ = ["forget", "running_server", "server"]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    records.close()
    yield
    records.close()
