# SPDX-License-Identifier: Apache-2.0
"""What outlives a process: records, encryption at rest, circuit breakers and the connection to Redis or Valkey."""
