# SPDX-License-Identifier: Apache-2.0
"""KV block keys that carry the cumulative image state. Engine process; see `layout.py` for the bytes."""
