# SPDX-License-Identifier: Apache-2.0
"""The models with a counted vision tower, in vLLM's ModelRegistry."""

from vllm_mmcache.models.registration import Registration

_registration = Registration(
    {
        "Gemma3ForConditionalGeneration": "vllm_mmcache.models.gemma3:CountedGemma3",
        "Qwen2VLForConditionalGeneration": "vllm_mmcache.models.qwen:CountedQwen2VL",
        "Qwen2_5_VLForConditionalGeneration": "vllm_mmcache.models.qwen:CountedQwen2_5VL",
        "Qwen3VLForConditionalGeneration": "vllm_mmcache.models.qwen:CountedQwen3VL",
        "Qwen3_5ForConditionalGeneration": "vllm_mmcache.models.qwen:CountedQwen3_5",
    }
)
install = _registration.install
undo = _registration.undo
