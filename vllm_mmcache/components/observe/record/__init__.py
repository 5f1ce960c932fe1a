# SPDX-License-Identifier: Apache-2.0
"""What is written down of a request: collected in the API server and the engine, joined, explained and kept."""
