# SPDX-License-Identifier: Apache-2.0
"""How much is run: CI a part, `make matrix` (TEST_MATRIX=1) all; random tests TEST_SCALE times (`make soak`)."""

import os

import pytest

SCALE = int(os.environ.get("TEST_SCALE", "1"))
WHOLE = os.environ.get("TEST_MATRIX") == "1"

larger = pytest.mark.skipif(not WHOLE, reason="`make matrix` runs it: TEST_MATRIX=1")

# Families whose engines `make matrix` alone starts: CI has one of each kind that users run most.
LARGER_FAMILIES = frozenset({"gemma4-causal", "glm4v", "internvl", "lfm2-vl", "minicpm-v", "mistral3"})


def scaled(number: int) -> int:
    return number * SCALE
