# SPDX-License-Identifier: Apache-2.0
"""The table of features that components are tried with: what shows each, and that one that shows nothing is found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from scripts import composes_page
from tests.engine.composes.features import BY_NAME, FEATURES, Feature
from tests.engine.composes.running import difference, judge, run
from tests.support.sizes import larger

pytestmark = pytest.mark.answers


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("composes")


def marks(feature: Feature) -> tuple[Any, ...]:
    return (pytest.mark.engine,) if feature.in_ci else (pytest.mark.engine, larger)


IN_ENGINES = [pytest.param(one, id=one.name, marks=marks(one)) for one in FEATURES if not one.shown_by]


@pytest.mark.parametrize("feature", IN_ENGINES)
def test_feature(feature: Feature, scratch: Path) -> None:
    engine = os.environ.get("TEST_ENGINE", "v1")
    delta = judge(feature, run(feature, scratch, engine), engine)
    print(f"max |delta logprob| {delta:.1e}")  # shown by pytest -rP


STEP = {"5": -1.0, "7": -2.0}
SAID = {"vector": [], "tokens": [[5, 5]], "logprobs": [[STEP, STEP]]}


def test_the_comparison_sees_a_difference() -> None:
    """Negative control: another token that is no tie, another probability, another number, and a lost step."""
    assert difference(SAID, SAID) == 0.0
    assert difference(SAID, SAID | {"tokens": [[5, 7]]}) == float("inf")
    assert difference(SAID, SAID | {"logprobs": [[STEP, {"5": -1.0, "7": -2.5}]]}) == 0.5
    assert difference(SAID, SAID | {"logprobs": [[STEP, {"8": -1.0}]]}) == float("inf")
    assert difference(SAID | {"vector": [1.0, 0.0]}, SAID | {"vector": [1.0, 0.5]}) > 0.5
    with pytest.raises(AssertionError):
        difference(SAID, SAID | {"tokens": [[5]]})


def test_the_page_is_made_from_the_results() -> None:
    rows = composes_page.read()
    assert composes_page.PAGE.read_text() == composes_page.page(rows), "run: python -m scripts.composes_page"
    assert {row.feature for row in rows} <= {one.name for one in FEATURES}
    assert not [row.feature for row in rows if row.failed]


def test_the_results_are_the_tables() -> None:
    """What was recorded of an engine is what the table says of it now."""
    for row in composes_page.read():
        feature = BY_NAME[row.feature]
        if not feature.shown_by:
            assert bool(row.error) == (row.engine in feature.fails), row
            for component, expected in feature.expected(row.engine).items():
                assert row.error or row.failed or row.components[component] == expected, row


def test_another_result_makes_another_page() -> None:
    """Negative control; what failed is named."""
    rows = composes_page.read()
    changed = [composes_page.Row("lora", "v1", failed="it is unlike a cold run, says a test"), *rows[1:]]
    assert composes_page.page(changed) != composes_page.page(rows)
    assert "it is unlike a cold run, says a test" in composes_page.page(changed)
