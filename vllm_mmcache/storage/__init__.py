# SPDX-License-Identifier: Apache-2.0
"""What outlives a process: tiers in directories of files, in SQLite and in Redis or Valkey, and the records in them.

With encryption at rest, and circuit breakers for tiers that fail.
"""
