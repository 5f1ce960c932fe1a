# SPDX-License-Identifier: Apache-2.0
"""Says which requests the layer may touch (lifecycle/middleware.py adds it as the innermost of vLLM's application).

API server process. The layer must never let a reference reach a consumer that does not
ask vLLM's image loader: another media connector, another renderer than the Hugging Face one, a store of messages.
"""

from typing import Any

import vllm.envs as envs
from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.asgi import Scope
from vllm_mmcache.components.image_extraction.middleware import work_begun
from vllm_mmcache.components.lazy_media.hooks import is_at_hand
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.hooking.subclasses import base_of

hook = Hooks(
    "image_extraction",
    "api",
    why="a refusal is asked for again with the body as it came, but none whose images were fetched and opened",
    upstream="none: no answer says whether its request's images were fetched",
    remove_when="vLLM takes images out of bodies itself, which are megabytes of text to parse and copy (44688)",
)


@hook(
    "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    name="engine",
    reads=("vllm.renderers.hf:HfRenderer.render_messages_async",),
    why="a refusal is asked for again with the body as it came, but none that the engine has generated for",
    upstream="none: no answer says whether its request reached the engine",
)
async def mark_engine_called(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of AsyncLLM.add_request(...): what is refused from here on has cost the engine work."""
    outcome = await wrapped(*args, **kwargs)
    work_begun()
    return outcome


@hook(
    "vllm.multimodal.media.connector:MediaConnector.load_from_url",
    name="media",
)
def tell_layer_of_media(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of MediaConnector.load_from_url(url, media_io): images are fetched and opened now."""
    work_begun()
    return wrapped(*args, **kwargs)


@hook(
    "vllm.multimodal.media.connector:MediaConnector.load_from_url_async",
    name="media_async",
    args=("url", "media_io"),
    reads=("vllm.multimodal.media.connector:MediaConnector.load_from_url",),
)
async def open_known_at_once(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of MediaConnector.load_from_url_async(url, media_io); as tell_layer_of_media.

    A known image that was taken out of its body is opened here: the way to a thread and back takes longer.
    """
    work_begun()
    url, loader = (argument(wrapped, args, kwargs, name) for name in ("url", "media_io"))
    if is_at_hand(url, loader):
        return instance.load_from_url(url, loader)
    return await wrapped(*args, **kwargs)


def is_eligible(scope: Scope, path: str) -> bool:
    """Whether images are taken out of this request."""
    return status.is_on("image_extraction") and is_for_image_loader(scope, path)


def is_for_image_loader(scope: Scope, path: str) -> bool:
    """Whether every image of this request goes to vLLM's image loader as lazy_media has it, and nowhere else."""
    if not status.is_on("lazy_media"):
        return False
    if envs.VLLM_MEDIA_CONNECTOR != "http":
        return False
    if path.startswith("/v1/responses") and envs.VLLM_ENABLE_RESPONSES_API_STORE:
        return False  # a later request may name this one's messages
    from vllm.renderers.hf import HfRenderer

    state = scope["app"].state
    online_renderer = getattr(state, "online_renderer", None)
    vllm_config = getattr(state, "vllm_config", None)
    return (
        vllm_config is not None
        and vllm_config.model_config.is_multimodal_model
        and base_of(getattr(online_renderer, "renderer", None)) is HfRenderer
    )


def most_pixels() -> int:
    """Of an image that vLLM opens; 0 where it opens any."""
    return max(0, int(envs.VLLM_MAX_IMAGE_PIXELS))


def image_formats() -> tuple[str, ...]:
    """Those that vLLM opens, by Pillow's names."""
    return tuple(ALLOWED_IMAGE_FORMATS)
