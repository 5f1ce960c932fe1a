# SPDX-License-Identifier: Apache-2.0
"""What a server does not need of vllm-mmcache: tiny models and checks on them, a demo, a lint, checks of vLLM."""
