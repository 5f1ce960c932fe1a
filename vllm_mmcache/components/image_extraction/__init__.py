# SPDX-License-Identifier: Apache-2.0
"""Takes base64 images out of a request's JSON body before it is parsed, and keeps them as views on the bytes received.

`middleware` is the ASGI layer, `extract` takes the images out of a body, and `request_shapes` says which places of a
request hold images. The text of one image, and the placeholder that stands for it, are in the package `content`.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "image_extraction",
    __name__,
    hooks={"api": ("hooks",)},
    needs="lazy_media",
    images_only=True,
)
