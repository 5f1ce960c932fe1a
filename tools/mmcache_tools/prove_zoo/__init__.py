# SPDX-License-Identifier: Apache-2.0
"""`mmcache prove` and `make gpu-check` on the zoo's models: their items, each in a process of its own, and its checks.

vllm_mmcache/prove runs the items, judges them and says what they prove; it finds this package by name.
"""
