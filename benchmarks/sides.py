# SPDX-License-Identifier: Apache-2.0
"""Stock and plugin side by side: in results.py."""

from benchmarks.results import SIDES, in_turn, run_worker  # noqa: F401
