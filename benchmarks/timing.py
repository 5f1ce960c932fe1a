# SPDX-License-Identifier: Apache-2.0
"""Median seconds of pieces of work: in results.py."""

from benchmarks.results import Action, medians  # noqa: F401
