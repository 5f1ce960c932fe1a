# SPDX-License-Identifier: Apache-2.0
"""Takes base64 images out of a request's JSON body before it is parsed, and keeps them as views on the bytes received.

`layer` is the ASGI layer, `scan` finds the base64 text in the bytes, `shapes` says which places of a request hold
images, `payload` is one image's text, `references` connects the short names in the body with the payloads.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "lifted_bodies",
    __name__,
    hooks={"api": ("hooks",)},
    needs="lazy_media",
    images_only=True,
)
