# SPDX-License-Identifier: Apache-2.0
"""Settings in force for one test."""

from tests.support.store_server import put

__all__ = ["put"]
