# SPDX-License-Identifier: Apache-2.0
"""Puts identifiers in the place of vLLM's mm_hashes, and the tenant where images are opened and processed.

API server process: the event loop, vLLM's media threads, and its one thread for processing. Whether it is on is fixed
at start, since switching it later would mix two kinds of keys. A uuid must never become a key by itself.
"""

import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_mmcache.base import settings, status, tenant
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.batch.vllm_encoded_image import tenant_of
from vllm_mmcache.components.identity import audit, identifiers, kv_events
from vllm_mmcache.components.identity.aliases import ALIASES
from vllm_mmcache.content import content_name, image_namer, media_tenant
from vllm_mmcache.content.request_id import RequestScopedId
from vllm_mmcache.content.tenant_source import configured_source
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters

_WITHOUT_FILES = "vision_chunk"
"""The modality of Kimi K2.5's images, which come without the file that a digest would be compared with."""
# Whether several vLLM instances find each other's items by the client's names (an encoder-cache connector).
_NAMES_ARE_SHARED: ContextVar[bool] = ContextVar("mmcache_names_are_shared", default=False)


hook = Hooks(
    "identity",
    "api",
    why="the processor is not told the request's cache_salt",
    upstream="none: cache_salt is for KV blocks alone",
    remove_when="vLLM hands the salt to whoever opens and processes an image",
)


@hook(
    "vllm.multimodal.media.image:ImageMediaIO.__init__",
    name="media",
    why="what is known about image bytes is known to their tenant alone",
)
def remember_tenant(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ImageMediaIO.__init__: remembers the tenant for media threads, which know no request."""
    outcome = wrapped(*args, **kwargs)
    media_tenant.remember(instance)
    return outcome


@hook(
    "vllm.entrypoints.launchers.run_batch:run_request",
    name="batch",
    args=("request",),
    why="the lines of a batch file are no requests of a server, and each has a tenant of its own",
)
async def serve_batch_line(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of run_request(serving_engine_func, request, tracker): a line of a batch file, in a task of its own.

    A line has no headers, so its body's cache_salt holds what a header or key would hold.
    """
    salt = getattr(argument(wrapped, args, kwargs, "request").body, "cache_salt", None)
    tenant.SALT.set(configured_source().salt_of(salt) if salt and status.is_on("identity") else None)
    return await wrapped(*args, **kwargs)


@hook(
    "vllm.v1.engine.output_processor:OutputProcessor.add_request",
    name="blocks",
    args=("request",),
    reads=(
        "vllm.entrypoints.serve.utils.api_utils:validate_json_request",
        "vllm.entrypoints.generate.base.protocol:validate_cache_salt",
    ),
    why=(
        "half of the endpoints can't carry a cache_salt, and a tenant that a gateway names is in none; the engine is "
        "not told who has named an image"
    ),
    remove_when="vLLM takes the salt of KV blocks from a header or the API key",
)
def salt_blocks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of OutputProcessor.add_request(request), which sees each request last before its engine does.

    It gives the tenant's salt to the request's KV blocks, also where the endpoint has no field for a salt, and says on
    the request who has named its images. Raises: VLLMValidationError (HTTP 400) as `_require_tenant`.
    """
    request = argument(wrapped, args, kwargs, "request")
    if status.is_on("identity"):
        request.cache_salt = tenant.current(request.cache_salt)
        if request.mm_features and not request.cache_salt:  # processed by the client, so nobody has asked yet
            _require_tenant()
        image_namer.mark(request, instance)
    return wrapped(*args, **kwargs)


@hook(
    "vllm.renderers.base:make_async",
    name="threads",
    args=("func",),
    also=("vllm.entrypoints.pooling.base.io_processor:make_async",),
    why="vLLM's threads do not see the context of the request that they work for",
    remove_when="make_async copies the context, as asyncio.to_thread does",
)
def carry_context(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of make_async(func, executor): the thread sees the context of the request that it works for."""
    (func, *rest), rest_by_name = ((*args,), kwargs) if args else ((kwargs["func"],), _without(kwargs, "func"))

    def run(context: contextvars.Context, args: Any, kwargs: Any) -> Any:
        return context.run(func, *args, **kwargs)

    in_thread = wrapped(run, *rest, **rest_by_name)
    return lambda *args, **kwargs: in_thread(contextvars.copy_context(), args, kwargs)


@hook(
    "vllm.renderers.base:BaseRenderer.render_messages",
    name="names",
    args=("messages",),
    why="a uuid of any length is fetched for, hashed and sent to the engine",
    upstream="57219",
    remove_when="vLLM bounds uuids",
)
def check_messages(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Override of BaseRenderer.render_messages(messages): a wrong uuid is refused before anything is fetched.

    Raises: VLLMValidationError (HTTP 400) for one that is too long, or no Unicode text.
    """
    _check_names(argument(wrapped, args, kwargs, "messages"))
    return wrapped(*args, **kwargs)


@hook(
    "vllm.renderers.base:BaseRenderer.render_messages_async",
    name="names_async",
    args=("messages",),
    why="a uuid of any length is fetched for, hashed and sent to the engine",
    upstream="57219",
    remove_when="vLLM bounds uuids",
)
async def check_messages_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Override of BaseRenderer.render_messages_async(messages); as check_messages."""
    _check_names(argument(wrapped, args, kwargs, "messages"))
    return await wrapped(*args, **kwargs)


def _check_names(messages: Sequence[Any]) -> None:
    for message in messages if status.is_on("identity") else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("uuid") is not None:
                _check_name(str(part["uuid"]))  # as vLLM reads it


@hook(
    "vllm.renderers.base:BaseRenderer._process_tokens",
    name="request",
    args=("prompt",),
)
def process_tokens(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._process_tokens(prompt): sets and checks the tenant and the names of its items.

    Raises: VLLMValidationError (HTTP 400) for a wrong uuid or salt, and for no salt where one is required.
    """
    given = argument(wrapped, args, kwargs, "prompt")
    with _request(instance, given) as prompt:
        return _call_with(prompt, given, wrapped, args, kwargs)


@hook(
    "vllm.renderers.base:BaseRenderer._process_tokens_async",
    name="request_async",
    args=("prompt",),
)
async def process_tokens_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._process_tokens_async(prompt); as process_tokens."""
    given = argument(wrapped, args, kwargs, "prompt")
    with _request(instance, given) as prompt:
        return await _call_with(prompt, given, wrapped, args, kwargs)


def _call_with(prompt: Any, given: Any, wrapped: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives with `prompt` in the place of the one that it was given."""
    by_name = {name: prompt if one is given else one for name, one in kwargs.items()}
    return wrapped(*[prompt if one is given else one for one in args], **by_name)


@hook(
    "vllm.renderers.base:BaseRenderer._process_mm_uuids",
    name="own_names",
    args=("mm_uuid_items",),
    why="ids that vLLM makes for one request look like any client's",
)
def mark_own_names(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._process_mm_uuids(..., mm_uuid_items, ...): tells vLLM's names from those of clients.

    vLLM names the items itself where nothing is cached at all, so that nothing need be hashed.
    """
    given = argument(wrapped, args, kwargs, "mm_uuid_items")
    made: Mapping[str, Any] = wrapped(*args, **kwargs)
    if made is given:
        return made

    def marked(modality: str) -> list[Any]:
        before = given.get(modality) or [None] * len(made[modality])
        return [RequestScopedId(b) if a is None and b else b for a, b in zip(before, made[modality], strict=True)]

    return {modality: marked(modality) for modality in made}


@hook(
    "vllm.multimodal.hasher:_get_image_id_bytes",
    name="exif",
    args=("image",),
    why="a UUID in an image's EXIF replaces its pixels as its identity",
    upstream="51899",
    remove_when="vLLM does not read an image's identity from its EXIF",
)
def trust_no_exif(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of _get_image_id_bytes(image): an ImageID in the image's EXIF is not its identity, its pixels are."""
    return None if status.is_on("identity") else wrapped(*args, **kwargs)


@hook(
    "vllm.multimodal.processing.inputs:ProcessorInputs.get_mm_hashes",
    name="mm_hash",
    why=(
        "a uuid is the key of every cache, so whoever knows or reuses one gets another's image, and a salt keeps KV "
        "blocks apart alone"
    ),
    upstream="55439, 55547: uniqueness is the client's duty",
    remove_when="vLLM binds a uuid to content and tenant, and arguments of different types have different keys",
)
def identify(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ProcessorInputs.get_mm_hashes(model_id, hash_algorithm): modality -> identifiers.

    It calls vLLM's function twice: first without names and arguments, for the content ids; then with identifiers in the
    place of names, for what vLLM does with arguments. Runs in the one thread that processes, so nothing is evicted
    between the two.
    """
    salt = tenant.SALT.get()
    names: Mapping[str, Any] = instance.mm_uuid_items or {}
    arguments = _arguments(instance)
    named = any(name is not None for given in names.values() for name in given)
    if not status.is_on("identity") or not (salt or arguments or named):
        return wrapped(*args, **kwargs)
    items = {modality: found.get_all_items_for_hash() for modality, found in instance.mm_data_items.items()}
    names = {modality: names.get(modality) or [None] * len(found) for modality, found in items.items()}
    shared = _NAMES_ARE_SHARED.get()

    def is_shared(modality: str, name: str | None) -> bool:
        return shared and name is not None and not _is_unchecked(modality, name)

    def settled(modality: str, item: Any, name: str | None) -> str | None:
        """The name where no content id is wanted; vLLM leaves it as it is."""
        by_name = item is None or isinstance(name, RequestScopedId) or is_shared(modality, name)
        return (name or "") if by_name else None

    def final(modality: str, item: Any, name: str | None, content_id: str) -> str:
        if isinstance(name, RequestScopedId):
            return name
        _check_claim(modality, name, item)
        if is_shared(modality, name):
            assert name is not None
            return identifiers.name_identifier(modality, name, arguments, salt)
        if item is None:
            assert name is not None  # vLLM has checked that
            found = ALIASES.find(modality, name, salt)
            if found is None:
                return identifiers.unknown_identifier(modality, name, salt)
            content_id = found
        elif name is not None and not _is_unchecked(modality, name):
            ALIASES.bind(modality, name, salt, content_id)
        marker = kv_events.marker_in(name) if settings.current().kv_event_ids == "dynamo" else ""
        return identifiers.identifier(modality, content_id, arguments, salt, marker)

    by_name = {
        modality: [settled(modality, *one) for one in zip(found, names[modality], strict=True)]
        for modality, found in items.items()
    }
    # A vLLM with the patch content-bound-uuids would put content in the place of the identifiers, tenants included.
    as_given = {"bind_mm_uuids": False} if hasattr(instance, "bind_mm_uuids") else {}
    bare = dataclasses.replace(
        instance, mm_uuid_items=by_name, hf_processor_mm_kwargs={}, media_io_kwargs={}, **as_given
    )
    content_ids = wrapped.__func__(bare, *args, **kwargs)
    final_identifiers = {
        modality: [final(modality, *one) for one in zip(found, names[modality], content_ids[modality], strict=True)]
        for modality, found in items.items()
    }
    final_inputs = dataclasses.replace(instance, mm_uuid_items=final_identifiers, **as_given)
    return wrapped.__func__(final_inputs, *args, **kwargs)


@contextmanager
def _request(renderer: Any, prompt: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Within the block, the tenant of `prompt` is set. Yields the prompt, with the salt of a tenant that images name.

    Raises: VLLMValidationError (HTTP 400) for a wrong uuid or salt, and for no salt where one is required.
    """
    if not status.is_on("identity"):
        yield prompt
        return
    salt = tenant.current(prompt.get("cache_salt") or None)
    _check_salt(salt)
    if of_images := _tenant_of_images(prompt):
        if salt not in (None, of_images):
            raise VLLMValidationError(
                "An image names another tenant than its request: name the tenant once.", parameter="cache_salt"
            )
        salt = of_images
        prompt = {**prompt, "cache_salt": of_images}  # the caller may ask about other images with the same one
    names = prompt.get("multi_modal_uuids") or {}
    for given in names.values():
        for name in [given] if isinstance(given, str) else given or ():
            if name is not None:
                _check_name(name)
    if not salt and (names or prompt.get("multi_modal_data")):
        _require_tenant()
    salt_before = tenant.SALT.set(salt)
    shared_before = _NAMES_ARE_SHARED.set(renderer.config.ec_transfer_config is not None)
    try:
        yield prompt
    finally:
        _NAMES_ARE_SHARED.reset(shared_before)
        tenant.SALT.reset(salt_before)


def _require_tenant() -> None:
    """Raises: VLLMValidationError (HTTP 400) where requests with images have to name a tenant."""
    if settings.current().requires_tenant:
        named_by = tenant.REQUEST_SOURCE.get()
        raise VLLMValidationError(
            f"{named_by.in_words()} is required for requests with images, videos or audio.",
            parameter=named_by.parameter(),
        )


def _tenant_of_images(prompt: Mapping[str, Any]) -> str | None:
    """The salt of the tenant whose images a batch job asks about. Raises: VLLMValidationError for two tenants."""
    try:
        named = tenant_of(prompt.get("multi_modal_data") or {})
        return configured_source().salt_of(named) if named else None
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="cache_salt") from error


def _is_unchecked(modality: str, name: str) -> bool:
    """Whether a uuid claims a digest that can't be compared here, so that it must stand for nothing."""
    return content_name.is_claim(name) and (not content_name.is_readable(name) or modality == _WITHOUT_FILES)


def _check_claim(modality: str, name: str | None, item: Any) -> None:
    """item: None where the request has no content for it; then only a name that was bound before stands for something.

    Raises: VLLMValidationError (HTTP 400) for a uuid that claims the digest of another file than it comes with.
    """
    if name is None or item is None or not content_name.is_claim(name) or _is_unchecked(modality, name):
        return
    content = getattr(item, "original_bytes", None)
    if modality != "image" or content is None or content_name.name_of(content) != name:
        raise VLLMValidationError(
            "The 'uuid' of an image claims a digest that its file does not have: send the digest of this file, or a "
            f"uuid that does not begin with '{content_name.PREFIX}'.",
            parameter="uuid",
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise VLLMValidationError("A 'uuid' must be a string.", parameter="uuid")
    if len(name) > content_name.MAX_UUID_CHARS:
        most = content_name.MAX_UUID_CHARS
        audit.note(counters.ALIASES_TOO_LONG, f"a client sent a uuid of more than {most} characters")
        raise VLLMValidationError(f"A 'uuid' must be at most {most} characters, got {len(name)}.", parameter="uuid")
    check_text("uuid", name)


def _check_salt(salt: object) -> None:
    if isinstance(salt, str):
        check_text("cache_salt", salt)


def check_text(parameter: str, text: str) -> None:
    """Raises: VLLMValidationError (HTTP 400) for half of a surrogate pair, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise VLLMValidationError(f"'{parameter}' is not valid Unicode text.", parameter=parameter) from None


def _arguments(inputs: Any) -> str:
    """The request's own arguments as text; "" where it has none."""
    given = (inputs.hf_processor_mm_kwargs, inputs.media_io_kwargs)
    return identifiers.canonical(given) if any(given) else ""


def _without(kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}
