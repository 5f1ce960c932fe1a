# SPDX-License-Identifier: Apache-2.0
"""What the Makefile runs beside tests and benchmarks: checks, pages, environments."""
