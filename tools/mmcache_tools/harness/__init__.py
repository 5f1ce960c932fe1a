# SPDX-License-Identifier: Apache-2.0
"""What tests, benchmarks and the demo share: servers and their input."""
