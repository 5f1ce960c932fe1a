# SPDX-License-Identifier: Apache-2.0
"""A Valkey server for the tests of stores."""

from tests.support.store_server import running_server, server

__all__ = ["running_server", "server"]
