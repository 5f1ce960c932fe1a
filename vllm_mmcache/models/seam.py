# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 that refuses attention which would run its images causally, in vLLM's ModelRegistry."""

from vllm_mmcache.models.registration import Registration

_registration = Registration({"Gemma3ForConditionalGeneration": "vllm_mmcache.models.gemma3:ImageSpanGemma3"})
install = _registration.install
undo = _registration.undo
