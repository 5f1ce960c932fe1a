# SPDX-License-Identifier: Apache-2.0
"""What every result says of where it comes from: in results.py."""

from benchmarks.results import commit, processor, provenance  # noqa: F401
