# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 with a counted vision tower. Worker process.

vLLM's own classes; for Qwen3-VL and Qwen3.5 the features hold the DeepStack levels beside the base ones.
"""

from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

from vllm_mmcache.models.tower import CountedTower


class CountedQwen2VL(CountedTower, Qwen2VLForConditionalGeneration):
    """Qwen2VLForConditionalGeneration with a counted tower."""


class CountedQwen2_5VL(CountedTower, Qwen2_5_VLForConditionalGeneration):  # noqa: N801  the model's own name
    """Qwen2_5_VLForConditionalGeneration with a counted tower."""


class CountedQwen3VL(CountedTower, Qwen3VLForConditionalGeneration):
    """Qwen3VLForConditionalGeneration with a counted tower."""


class CountedQwen3_5(CountedTower, Qwen3_5ForConditionalGeneration):  # noqa: N801  the model's own name
    """Qwen3_5ForConditionalGeneration with a counted tower."""
