# SPDX-License-Identifier: Apache-2.0
"""Exact, image-aware caching for vLLM. Importing this changes nothing; `plugin.register` does the work."""

__version__ = "0.1.0"
