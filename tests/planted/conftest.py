# SPDX-License-Identifier: Apache-2.0
"""The Valkey server of the feature store's tests."""

from tests.features.conftest import running_server, server

__all__ = ["running_server", "server"]
