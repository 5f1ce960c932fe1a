# SPDX-License-Identifier: Apache-2.0
"""How components are shown to be exact: on the user's own model, against stock, and cold against warm.

The command's process loads no vLLM (proving.py, runs.py, items.py); an item has one of its own, with an engine
(worker.py, own_checks.py). What tiny models and Transformers add is in vllm-mmcache-tools, which builds on this.
Importing this package alone loads nothing.
"""
