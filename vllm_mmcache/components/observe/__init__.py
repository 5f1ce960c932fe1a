# SPDX-License-Identifier: Apache-2.0
"""Shows what the rooms count, and says of each request what was reused. Reads counters; no room imports it."""
