# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 that refuses images which would run causally. Worker process.

vLLM's own class plus one check; weights, processor and forward pass are vLLM's. That each attention layer can serve
image spans is checked where the layer is made, for every such model (attention/guard.py).
"""

from vllm.config import VllmConfig
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration

from vllm_mmcache.attention import guard
from vllm_mmcache.errors import CausalImages


class ImageSpanGemma3(Gemma3ForConditionalGeneration):
    """Gemma3ForConditionalGeneration whose images must fit the sliding window.

    Raises: CausalImages for images longer than the window, which vLLM's runner leaves out of the spans and so runs
    causally.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if not guard.is_wanted() or not vllm_config.model_config.is_mm_prefix_lm:
            return  # vLLM clears the mark in a text-only deployment
        config = vllm_config.model_config.hf_config
        window = getattr(config.text_config, "sliding_window", None)
        tokens = config.mm_tokens_per_image
        if window and tokens > window:
            raise CausalImages(
                f"an image has {tokens} tokens (mm_tokens_per_image) and the sliding window {window}; vLLM runs "
                "images that are longer than the window causally, so answers would be wrong. Serve a model whose "
                "images fit its window, or set MMCACHE_ALLOW_CAUSAL_IMAGES=1 to run it all the same"
            )
