# SPDX-License-Identifier: Apache-2.0
"""How rooms that touch the engine are shown to be exact: on the zoo's models against Transformers, cold against warm.

What is in here starts engines, and runs in processes of its own: the command's items (items.py starts them, checks.py
is what they do), the project's tests and its benchmarks. Importing this package alone loads nothing.
"""
