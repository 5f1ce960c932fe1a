# SPDX-License-Identifier: Apache-2.0
"""Opens images of batch jobs that came as their files, where vLLM's renderer begins with them. API server process."""

import logging
from functools import cache
from typing import Any

from PIL import Image

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import named
from vllm_mmcache.batch.vllm_encoded_image import encoded_in, images_of, with_opened
from vllm_mmcache.hooking.hook import Hooks

logger = logging.getLogger("vllm.mmcache")

hook = Hooks("lazy_media", "api")


@hook(
    "vllm.renderers.base:BaseRenderer._process_multimodal",
    name="batch",
    args=("mm_data",),
    why="an image of a batch job comes as pixels, and is decoded for each question about it",
    upstream="57752 (lazy media, an experiment)",
    remove_when="vLLM takes an image as its file from an offline prompt",
)
def open_images(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._process_multimodal(..., mm_data, ...): EncodedImages become what vLLM's loader opens.

    lazy_processing has opened them before, in its threads, where it is on. Raises: what EncodedImage.open raises.
    """
    given = named(wrapped, args, kwargs)
    encoded = encoded_in(given["mm_data"])
    if encoded and status.is_on("lazy_media"):
        opened = with_opened(given["mm_data"], [one.open() for one in encoded])
        return wrapped(**{**given, "mm_data": opened})
    is_at_start = not status.in_force()  # a trial asks about pictures of its own
    if not is_at_start and any(isinstance(image, Image.Image) for image in images_of(given["mm_data"])):
        _say_that_pixels_came()
    return wrapped(*args, **kwargs)


@cache
def _say_that_pixels_came() -> None:
    """Once in a process: whoever has decoded an image has done so for each question about it."""
    logger.info(
        "mmcache: images come as PIL objects, so they are decoded before they get here and hashed by their pixels; "
        "vllm_mmcache.batch.EncodedImage carries the file instead (docs/batch.md)"
    )
