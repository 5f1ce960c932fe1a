# SPDX-License-Identifier: Apache-2.0
"""What checks, tests, benchmarks and the demo share: engines on the zoo's models, servers, and what they are asked."""
