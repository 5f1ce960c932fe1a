# SPDX-License-Identifier: Apache-2.0
"""The engine pool of the exactness tests, and an order of the tests that starts each engine once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.exactness.engines import EnginePool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """At most one engine alive; closed at the end of the session."""
    from tests.exactness.engines import EnginePool

    engines = EnginePool(tmp_path_factory.mktemp("zoo"))
    yield engines
    engines.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the engine tests of this folder by configuration; the sort is stable, all else keeps its place."""
    here = Path(__file__).parent
    slots = [i for i, item in enumerate(items) if item.path.parent == here and hasattr(item, "callspec")]

    def configuration(item: Any) -> str:
        return str(item.callspec.params.get("config"))

    for slot, item in zip(slots, sorted((items[i] for i in slots), key=configuration), strict=True):
        items[slot] = item
