# SPDX-License-Identifier: Apache-2.0
"""Makes the images of a request ready before vLLM's one thread for processing takes it. API server process.

In a pool of threads, side by side with those of other requests: an image whose record is known becomes a deferred item,
without pixels; one that is unknown goes through vLLM's own processor here. What is not ready, for whatever reason, is
processed as it always was, and fails as it always did. Nothing is deferred unless features are kept everywhere.
"""

from typing import Any

from vllm_mmcache.base import status
from vllm_mmcache.components.lazy_processing.prepare import ItemPreparer, are_named_by_content
from vllm_mmcache.components.lazy_processing.vllm_processor import (
    is_for_one,
)
from vllm_mmcache.hooking.hook import Hooks

hook = Hooks(
    "lazy_processing",
    "api",
)


@hook(
    "vllm.renderers.base:BaseRenderer.__init__",
    name="renderer",
    reads=(
        "vllm.renderers.base:BaseRenderer._process_multimodal",
        "vllm.multimodal.processing.processor:BaseMultiModalProcessor._cached_apply_hf_processor",
        "vllm.multimodal.processing.processor:BaseMultiModalProcessor._get_mm_hashes",
    ),
    why="one thread processes all images, known ones too when they have left vLLM's processor cache",
    upstream="55583, 57752 (both open)",
    remove_when="vLLM makes pixels where its encoder needs them, and processes images side by side",
)
def build_renderer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer.__init__: its processor cache is ours around vLLM's, and images are ready before it."""
    outcome = wrapped(*args, **kwargs)
    processor = instance.mm_processor
    if status.is_on("lazy_processing") and are_named_by_content(instance) and is_for_one(processor):
        caches = instance._mm_processor_cache, instance._mm_processor_only_cache
        preparer = ItemPreparer(processor, instance.model_config, *caches)
        instance._mm_processor_cache, instance._mm_processor_only_cache = preparer.cache, preparer.tokens_cache
        instance._resources.callback(preparer.close)
        instance._process_multimodal_async = preparer.around_async(instance._process_multimodal_async)
        instance._process_multimodal = preparer.around(instance._process_multimodal)
    return outcome
