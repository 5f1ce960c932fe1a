# SPDX-License-Identifier: Apache-2.0
"""How large the random tests are: TEST_SCALE times what CI runs. `make soak` sets it."""

import os

SCALE = int(os.environ.get("TEST_SCALE", "1"))


def scaled(number: int) -> int:
    return number * SCALE
