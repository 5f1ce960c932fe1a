# SPDX-License-Identifier: Apache-2.0
"""`make matrix`: the second environment with vLLM 0.33, its operators, and the page of results."""
