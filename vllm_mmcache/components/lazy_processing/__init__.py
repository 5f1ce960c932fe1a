# SPDX-License-Identifier: Apache-2.0
"""Pixels are made where the tower needs them: a known image goes to the engine as its record and its encoded bytes.

`record` is what vLLM's processor made of an item, less its pixels; `item` is such an item on its way to the engine;
`ready` and `cache` give vLLM's own processor what is known, and `renderer` puts them before its one thread. `making`
makes the pixels after all, in the engine (`waiting`) or in a worker.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "pixels",
    __name__,
    hooks={"api": ("hooks",)},
    rule="rules:state_in",
    needs="lazy_media",
    images_only=True,
)
