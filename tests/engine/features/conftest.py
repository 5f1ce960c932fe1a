# SPDX-License-Identifier: Apache-2.0
"""Requests are held back until their features are there."""

from tests.support.store_server import patience

__all__ = ["patience"]
