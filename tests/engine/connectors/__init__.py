# SPDX-License-Identifier: Apache-2.0
"""KV connectors: what vLLM loads from outside is the KV of the same content, and what is behind it is exact."""
