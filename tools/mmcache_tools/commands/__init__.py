# SPDX-License-Identifier: Apache-2.0
"""The verbs of the command mmcache that come with these tools."""
