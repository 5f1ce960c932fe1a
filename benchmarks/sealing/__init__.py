# SPDX-License-Identifier: Apache-2.0
"""What encryption at rest costs a load and a save of features, and a record."""
