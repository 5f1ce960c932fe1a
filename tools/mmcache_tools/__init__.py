# SPDX-License-Identifier: Apache-2.0
"""What a server does not need of vllm-mmcache: tiny models, a demo, a lint of chat templates, checks of vLLM."""
