# SPDX-License-Identifier: Apache-2.0
"""Keeps the state at image boundaries, so that the second question about an image is a hit. Engine process.

Only for models whose KV cache keeps states sparsely: sliding-window and Mamba (GDN) groups. vLLM keeps the state of
such groups at a prompt's end alone; a request that shares the image but not the question finds nothing there. A
positive `prefix_cache_retention_interval` would keep states at every so many tokens: a hit falls short by up to that
many, and every prompt pays. A checkpoint of a Mamba model ends a prefill chunk, so it changes which images share a run
of the tower: that weighs more in a first request's time than the checkpoint itself.
"""
