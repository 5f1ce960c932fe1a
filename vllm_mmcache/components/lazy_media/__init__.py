# SPDX-License-Identifier: Apache-2.0
"""Images whose bytes are known stay undecoded until somebody needs their pixels.

`picture` is such an image, `records` is what is known about the bytes, `loader` puts both under vLLM's image loader.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "lazy_media",
    __name__,
    hooks={"api": ("hooks", "video.hooks")},
    images_only=True,
    superseded_by=("vllm.multimodal.media.image:ImageMediaIO.load_bytes_lazy",),
)
