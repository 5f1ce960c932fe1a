# SPDX-License-Identifier: Apache-2.0
"""A Valkey server, and settings in force for one test."""

from tests.support.store_server import alone, put, running_server, server

__all__ = ["alone", "put", "running_server", "server"]
