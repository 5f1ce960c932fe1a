# SPDX-License-Identifier: Apache-2.0
"""How functions of vLLM are replaced or overridden, and what was replaced is put back."""
