# SPDX-License-Identifier: Apache-2.0
"""No records of one test in another."""

from collections.abc import Iterator

import pytest

from vllm_mmcache.storage import records


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    records.close()
    yield
    records.close()
