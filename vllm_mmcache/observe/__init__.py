# SPDX-License-Identifier: Apache-2.0
"""Shows what the rooms count. Reads events; no room imports it."""
