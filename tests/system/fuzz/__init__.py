# SPDX-License-Identifier: Apache-2.0
"""Bytes from outside, by the hundred thousand: what a case must keep (`checks`), what cases look like (`cases`).

CI runs some thousands, `make soak` a million (TEST_SCALE). `python -m tests.system.fuzz.guided` looks for new paths
through the code with atheris, for as long as one likes.
"""
