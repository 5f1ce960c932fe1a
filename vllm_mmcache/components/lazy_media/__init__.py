# SPDX-License-Identifier: Apache-2.0
"""Images whose bytes are known stay undecoded until somebody needs their pixels.

`lazy_image` is such an image, `media_info` is what is known about the bytes, and `hooks` puts both under vLLM's image
loader; `hooks_batch` opens the images of batch jobs, and `video/` does the same for videos.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "lazy_media",
    __name__,
    hooks={"api": ("hooks", "hooks_batch", "video.hooks")},
    images_only=True,
    superseded_by=("vllm.multimodal.media.image:ImageMediaIO.load_bytes_lazy",),
)
