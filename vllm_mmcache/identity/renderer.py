# SPDX-License-Identifier: Apache-2.0
"""Puts identifiers in the place of vLLM's mm_hashes, and the tenant where images are opened and processed.

API server process: the event loop, vLLM's media threads, and its one thread for processing. Fixed at start: switching
it midway would mix two key spaces. A uuid must never become a key by itself.
"""

import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_mmcache import rooms, settings, tenant
from vllm_mmcache.arguments import argument
from vllm_mmcache.identity import audit, layout
from vllm_mmcache.identity.aliases import ALIASES
from vllm_mmcache.metrics import counters

# Whether several vLLM instances find each other's items by the client's names (an encoder-cache connector).
_NAMES_ARE_SHARED: ContextVar[bool] = ContextVar("mmcache_names_are_shared", default=False)


class OneRequest(str):
    """An id that vLLM made for one item of one request."""

    __slots__ = ()


def read_salt(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of validate_cache_salt(cache_salt): every endpoint calls it before it does anything with a request.

    Raises: VLLMValidationError (HTTP 400) for a salt that is no Unicode text, and what vLLM's own raises.
    """
    outcome = wrapped(*args, **kwargs)
    if rooms.is_on("identity"):
        salt = argument(wrapped, args, kwargs, "cache_salt")
        _check_salt(salt)
        tenant.SALT.set(salt)
    return outcome


def carry_context(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of make_async(func, executor): the thread sees the context of the request that it works for."""
    (func, *rest), rest_by_name = ((*args,), kwargs) if args else ((kwargs["func"],), _without(kwargs, "func"))

    def run(context: contextvars.Context, args: Any, kwargs: Any) -> Any:
        return context.run(func, *args, **kwargs)

    in_thread = wrapped(run, *rest, **rest_by_name)
    return lambda *args, **kwargs: in_thread(contextvars.copy_context(), args, kwargs)


def check_messages(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Override of BaseRenderer.render_messages(messages): a wrong uuid is refused before anything is fetched.

    Raises: VLLMValidationError (HTTP 400) for one that is too long, or no Unicode text.
    """
    _check_names(argument(wrapped, args, kwargs, "messages"))
    return wrapped(*args, **kwargs)


async def check_messages_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Override of BaseRenderer.render_messages_async(messages); as check_messages."""
    _check_names(argument(wrapped, args, kwargs, "messages"))
    return await wrapped(*args, **kwargs)


def _check_names(messages: Sequence[Any]) -> None:
    for message in messages if rooms.is_on("identity") else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("uuid") is not None:
                _check_name(str(part["uuid"]))  # as vLLM reads it


def process_tokens(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._process_tokens(prompt): tenant and names of its items are in force within.

    Raises: VLLMValidationError (HTTP 400) for a wrong uuid or salt, and for no salt where one is required.
    """
    with _request(instance, argument(wrapped, args, kwargs, "prompt")):
        return wrapped(*args, **kwargs)


async def process_tokens_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._process_tokens_async(prompt); as process_tokens."""
    with _request(instance, argument(wrapped, args, kwargs, "prompt")):
        return await wrapped(*args, **kwargs)


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
        return [OneRequest(b) if a is None and b else b for a, b in zip(before, made[modality], strict=True)]

    return {modality: marked(modality) for modality in made}


def trust_no_exif(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of _get_image_id_bytes(image): an ImageID in the image's EXIF is not its identity, its pixels are."""
    return None if rooms.is_on("identity") else wrapped(*args, **kwargs)


def identify(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ProcessorInputs.get_mm_hashes(model_id, hash_algorithm): modality -> identifiers.

    Twice vLLM's own: first for the content ids, without names and arguments; then, with identifiers in the place of
    names, for what it does with arguments. Runs in the one thread that processes, so nothing is evicted in between.
    """
    salt = tenant.SALT.get()
    names: Mapping[str, Any] = instance.mm_uuid_items or {}
    arguments = _arguments(instance)
    named = any(name is not None for given in names.values() for name in given)
    if not rooms.is_on("identity") or not (salt or arguments or named):
        return wrapped(*args, **kwargs)
    items = {modality: found.get_all_items_for_hash() for modality, found in instance.mm_data_items.items()}
    names = {modality: names.get(modality) or [None] * len(found) for modality, found in items.items()}
    shared = _NAMES_ARE_SHARED.get()

    def settled(item: Any, name: str | None) -> str | None:
        """The name where no content id is wanted; vLLM leaves it as it is."""
        by_name = item is None or isinstance(name, OneRequest) or (shared and name is not None)
        return (name or "") if by_name else None

    def final(modality: str, item: Any, name: str | None, content_id: str) -> str:
        if isinstance(name, OneRequest):
            return name
        if shared and name is not None:
            return layout.name_identifier(modality, name, arguments, salt)
        if item is None:
            assert name is not None  # vLLM has checked that
            found = ALIASES.find(modality, name, salt)
            if found is None:
                return layout.unknown_identifier(modality, name, salt)
            content_id = found
        elif name is not None:
            ALIASES.bind(modality, name, salt, content_id)
        return layout.identifier(modality, content_id, arguments, salt)

    by_name = {modality: [*map(settled, found, names[modality])] for modality, found in items.items()}
    # A vLLM with the patch content-bound-uuids would put content in the place of the identifiers, tenants included.
    as_given = {"bind_mm_uuids": False} if hasattr(instance, "bind_mm_uuids") else {}
    bare = dataclasses.replace(
        instance, mm_uuid_items=by_name, hf_processor_mm_kwargs={}, media_io_kwargs={}, **as_given
    )
    content_ids = wrapped.__func__(bare, *args, **kwargs)
    identifiers = {
        modality: [final(modality, *one) for one in zip(found, names[modality], content_ids[modality], strict=True)]
        for modality, found in items.items()
    }
    final_inputs = dataclasses.replace(instance, mm_uuid_items=identifiers, **as_given)
    return wrapped.__func__(final_inputs, *args, **kwargs)


@contextmanager
def _request(renderer: Any, prompt: Mapping[str, Any]) -> Iterator[None]:
    """What identifies the items of `prompt` is in force within the block. Raises: VLLMValidationError (HTTP 400)."""
    if not rooms.is_on("identity"):
        yield
        return
    salt = prompt.get("cache_salt") or None
    _check_salt(salt)
    names = prompt.get("multi_modal_uuids") or {}
    for given in names.values():
        for name in [given] if isinstance(given, str) else given or ():
            if name is not None:
                _check_name(name)
    if settings.current().require_salt and not salt and (names or prompt.get("multi_modal_data")):
        raise VLLMValidationError(
            "Parameter 'cache_salt' is required for requests with images, videos or audio.", parameter="cache_salt"
        )
    salt_before = tenant.SALT.set(salt)
    shared_before = _NAMES_ARE_SHARED.set(renderer.config.ec_transfer_config is not None)
    try:
        yield
    finally:
        _NAMES_ARE_SHARED.reset(shared_before)
        tenant.SALT.reset(salt_before)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise VLLMValidationError("A 'uuid' must be a string.", parameter="uuid")
    if len(name) > layout.MAX_NAME_CHARS:
        audit.note(counters.ALIASES_TOO_LONG, f"a client sent a uuid of more than {layout.MAX_NAME_CHARS} characters")
        raise VLLMValidationError(
            f"A 'uuid' must be at most {layout.MAX_NAME_CHARS} characters, got {len(name)}.", parameter="uuid"
        )
    _check_text("uuid", name)


def _check_salt(salt: object) -> None:
    if isinstance(salt, str):
        _check_text("cache_salt", salt)


def _check_text(parameter: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise VLLMValidationError(f"'{parameter}' is not valid Unicode text.", parameter=parameter) from None


def _arguments(inputs: Any) -> str:
    """The request's own arguments as text; "" where it has none."""
    given = (inputs.hf_processor_mm_kwargs, inputs.media_io_kwargs)
    return layout.canonical(given) if any(given) else ""


def _without(kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}
