# SPDX-License-Identifier: Apache-2.0
"""The part of the ledger that binds images to their content and tenant; data only, as the rest.

Without it nothing is wrong that stock does right, so a mismatch leaves the group off, in one line at level ERROR; who
relies on it sets `require_tenant`, and then nothing starts without it.
"""

from functools import partial

from vllm_mmcache.hooking.hooks import TESTED_VLLM, Hook

_hook = partial(Hook, vllm=TESTED_VLLM)

_UPSTREAM = "none: cache_salt is for KV blocks alone"
_REMOVE = "vLLM hands the salt to whoever opens and processes an image"

IDENTITY: tuple[Hook, ...] = (
    _hook(
        name="identity.mm_hash",
        group="identity",
        target="vllm.multimodal.processing.inputs:ProcessorInputs.get_mm_hashes",
        make="vllm_mmcache.components.identity.hooks:identify",
        process="api",
        args_used=(),
        why=(
            "a uuid is the key of every cache, so whoever knows or reuses one gets another's image, and a salt keeps "
            "KV blocks apart alone"
        ),
        upstream="55439, 55547: uniqueness is the client's duty",
        remove_when="vLLM binds a uuid to content and tenant, and arguments of different types have different keys",
    ),
    _hook(
        name="identity.request",
        group="identity",
        target="vllm.renderers.base:BaseRenderer._process_tokens",
        make="vllm_mmcache.components.identity.hooks:process_tokens",
        process="api",
        args_used=("prompt",),
        why="the processor is not told the request's cache_salt",
        upstream=_UPSTREAM,
        remove_when=_REMOVE,
    ),
    _hook(
        name="identity.request_async",
        group="identity",
        target="vllm.renderers.base:BaseRenderer._process_tokens_async",
        make="vllm_mmcache.components.identity.hooks:process_tokens_async",
        process="api",
        args_used=("prompt",),
        why="the processor is not told the request's cache_salt",
        upstream=_UPSTREAM,
        remove_when=_REMOVE,
    ),
    _hook(
        name="identity.own_names",
        group="identity",
        target="vllm.renderers.base:BaseRenderer._process_mm_uuids",
        make="vllm_mmcache.components.identity.hooks:mark_own_names",
        process="api",
        args_used=("mm_uuid_items",),
        why="ids that vLLM makes for one request look like any client's",
        upstream=_UPSTREAM,
        remove_when=_REMOVE,
    ),
    _hook(
        name="identity.threads",
        group="identity",
        target="vllm.renderers.base:make_async",
        also=("vllm.entrypoints.pooling.base.io_processor:make_async",),
        make="vllm_mmcache.components.identity.hooks:carry_context",
        process="api",
        args_used=("func",),
        why="vLLM's threads do not see the context of the request that they work for",
        upstream=_UPSTREAM,
        remove_when="make_async copies the context, as asyncio.to_thread does",
    ),
    _hook(
        name="identity.batch",
        group="identity",
        target="vllm.entrypoints.launchers.run_batch:run_request",
        make="vllm_mmcache.components.identity.hooks:serve_batch_line",
        process="api",
        args_used=("request",),
        why="the lines of a batch file are no requests of a server, and each has a tenant of its own",
        upstream=_UPSTREAM,
        remove_when=_REMOVE,
    ),
    _hook(
        name="identity.blocks",
        group="identity",
        target="vllm.v1.engine.output_processor:OutputProcessor.add_request",
        reads=(
            "vllm.entrypoints.serve.utils.api_utils:validate_json_request",
            "vllm.entrypoints.generate.base.protocol:validate_cache_salt",
        ),
        make="vllm_mmcache.components.identity.hooks:salt_blocks",
        process="api",
        args_used=("request",),
        why=(
            "half of the endpoints can't carry a cache_salt, and a tenant that a gateway names is in none; the engine "
            "is not told whether a client has named an image"
        ),
        upstream=_UPSTREAM,
        remove_when="vLLM takes the salt of KV blocks from a header or the API key",
    ),
    _hook(
        name="identity.media",
        group="identity",
        target="vllm.multimodal.media.image:ImageMediaIO.__init__",
        make="vllm_mmcache.components.identity.hooks:remember_tenant",
        process="api",
        args_used=(),
        why="what is known about image bytes is known to their tenant alone",
        upstream=_UPSTREAM,
        remove_when=_REMOVE,
    ),
    _hook(
        name="identity.names",
        group="identity",
        target="vllm.renderers.base:BaseRenderer.render_messages",
        make="vllm_mmcache.components.identity.hooks:check_messages",
        process="api",
        args_used=("messages",),
        why="a uuid of any length is fetched for, hashed and sent to the engine",
        upstream="57219",
        remove_when="vLLM bounds uuids",
    ),
    _hook(
        name="identity.names_async",
        group="identity",
        target="vllm.renderers.base:BaseRenderer.render_messages_async",
        make="vllm_mmcache.components.identity.hooks:check_messages_async",
        process="api",
        args_used=("messages",),
        why="a uuid of any length is fetched for, hashed and sent to the engine",
        upstream="57219",
        remove_when="vLLM bounds uuids",
    ),
    _hook(
        name="identity.exif",
        group="identity",
        target="vllm.multimodal.hasher:_get_image_id_bytes",
        make="vllm_mmcache.components.identity.hooks:trust_no_exif",
        process="api",
        args_used=("image",),
        why="a UUID in an image's EXIF replaces its pixels as its identity",
        upstream="51899",
        remove_when="vLLM does not read an image's identity from its EXIF",
    ),
)
