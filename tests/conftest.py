# SPDX-License-Identifier: Apache-2.0
"""The engine pool of the exactness tests, the size of property tests, and an order that starts each engine once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.sizes import scaled

if TYPE_CHECKING:
    from tests.exactness.engines import EnginePool

# Of the property tests that don't name their own number.
settings.register_profile("scaled", max_examples=scaled(100))
settings.load_profile("scaled")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """At most one engine alive; closed at the end of the session."""
    from tests.exactness.engines import EnginePool

    engines = EnginePool(tmp_path_factory.mktemp("zoo"))
    yield engines
    engines.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share engines come last, grouped by configuration; the sort is stable, all else keeps its place."""

    def place(item: Any) -> tuple[bool, str]:
        shares = "pool" in getattr(item, "fixturenames", ())
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return shares, str(params.get("config", item.path)) if shares else ""

    items.sort(key=place)
