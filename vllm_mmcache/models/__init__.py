# SPDX-License-Identifier: Apache-2.0
"""vLLM model classes with what mmcache adds. Worker process."""
