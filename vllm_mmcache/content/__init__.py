# SPDX-License-Identifier: Apache-2.0
"""Whose an image is and what it shows: tenants, content ids, and placeholders that stand for images by these ids."""
