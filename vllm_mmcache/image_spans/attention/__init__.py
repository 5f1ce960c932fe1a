# SPDX-License-Identifier: Apache-2.0
"""Attention over images that reads the full KV from the paged cache. Worker process; see docs/image_attention.md."""
