# SPDX-License-Identifier: Apache-2.0
"""Pixels are made where the tower needs them: a known image goes to the engine as its record and its encoded bytes.

`vllm_item_record` is what vLLM's processor made of an item, less its pixels; `vllm_item` is such an item on its way to
the engine; `hooks` and `vllm_cache` give vLLM's own processor what is known, before its one thread. `vllm_pixels` makes
the pixels after all, in the engine (`pixel_pool`) or in a worker.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "lazy_processing",
    __name__,
    hooks={"api": ("hooks",)},
    rule="rules:state_in",
    needs="lazy_media",
    images_only=True,
)
