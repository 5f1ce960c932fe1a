# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named `cpu` that compiles nothing: with TRITON_INTERPRET=1 nobody asks it to."""
