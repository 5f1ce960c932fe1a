# SPDX-License-Identifier: Apache-2.0
"""The feature store's part in a worker process: copies between the device and the memory shared with the engine."""
