# SPDX-License-Identifier: Apache-2.0
"""The part of the ledger that takes images out of request bodies before vLLM parses them; data only, as the rest."""

from functools import partial

from vllm_mmcache.hooking.hooks import TESTED_VLLM, Hook

_hook = partial(Hook, vllm=TESTED_VLLM)

_REMOVE = "vLLM takes images out of bodies itself, which are megabytes of text to parse and copy (44688)"
_MEDIA_WHY = "a refusal is asked for again with the body as it came, but none whose images were fetched and opened"
_MEDIA_UPSTREAM = "none: no answer says whether its request's images were fetched"

BODIES: tuple[Hook, ...] = (
    _hook(
        name="lifted_bodies.engine",
        group="lifted_bodies",
        target="vllm.v1.engine.async_llm:AsyncLLM.add_request",
        reads=("vllm.renderers.hf:HfRenderer.render_messages_async",),
        make="vllm_mmcache.components.image_extraction.hooks:tell_layer",
        process="api",
        args_used=(),
        why="a refusal is asked for again with the body as it came, but none that the engine has generated for",
        upstream="none: no answer says whether its request reached the engine",
        remove_when=_REMOVE,
    ),
    _hook(
        name="lifted_bodies.media",
        group="lifted_bodies",
        target="vllm.multimodal.media.connector:MediaConnector.load_from_url",
        make="vllm_mmcache.components.image_extraction.hooks:tell_layer_of_media",
        process="api",
        args_used=(),
        why=_MEDIA_WHY,
        upstream=_MEDIA_UPSTREAM,
        remove_when=_REMOVE,
    ),
    _hook(
        name="lifted_bodies.media_async",
        group="lifted_bodies",
        target="vllm.multimodal.media.connector:MediaConnector.load_from_url_async",
        make="vllm_mmcache.components.image_extraction.hooks:tell_layer_of_media",
        process="api",
        args_used=(),
        why=_MEDIA_WHY,
        upstream=_MEDIA_UPSTREAM,
        remove_when=_REMOVE,
    ),
)
