# SPDX-License-Identifier: Apache-2.0
"""Attention in its plainest form, over the whole K and V of a sequence from the paged cache: what kernels must equal.

naive.py is the arithmetic; vllm_layers.py lays it beside the attention layers of a running model, to serve with it (the
setting attention=reference) or, in comparison.py, to compare a few rows of real steps (the trial at start).
"""
