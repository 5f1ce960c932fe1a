# SPDX-License-Identifier: Apache-2.0
"""The API server's side of a record: what it sees of messages and images goes down with the request.

API server, or the offline program; event loop and the renderer's threads. Notes are laid beside what vLLM's renderer
returns and are taken away again when the engine's request is made, so that nothing is left of a request that fails.
Of text only digests are kept. It must never fail a request.
"""

import asyncio
import contextlib
import itertools
import marshal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash
from blake3 import blake3

from vllm_mmcache.base import status, tenant
from vllm_mmcache.base.arguments import argument, named
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.batch.vllm_encoded_image import EncodedImage
from vllm_mmcache.components.lazy_media.lazy_image import LazyImage
from vllm_mmcache.components.observe.record import wire
from vllm_mmcache.components.observe.record.digests import salt_class
from vllm_mmcache.components.observe.record.pending import UNKNOWN, Layers, RequestSnapshot
from vllm_mmcache.components.observe.record.recorder import RECORDER, message_digest
from vllm_mmcache.components.observe.record.schema import REQUEST_ID_CHARS
from vllm_mmcache.components.observe.record.turns import Marks, find_marks
from vllm_mmcache.hooking.hook import Hooks

MOST_TEMPLATES = 64
"""Chat templates whose marks are known at a time."""
TEMPLATE_COST_BYTES = 4096  # its digests, and a few roles
MARKS_S = 2.0
"""How long a request waits for the marks of its chat template while they are found, in seconds; a model's own takes a
few milliseconds."""

_CHAT = "mmcache_chat"
_IMAGES = "mmcache_images"
_MARKS = "_mmcache_marks"
_PROBED = "_mmcache_probed"  # on a renderer: templates that are being probed, by digest
_SALT = "_mmcache_salt"
_processing = threading.local()
_probing = Threads("templates", 1)


hook = Hooks(
    "observe",
    "api",
    upstream="43587, 51250, 45238, 31920 ask why; the RFC 43711 went stale",
    remove_when="vLLM says for each request what was not reused and why",
)


@hook(
    "vllm.renderers.base:BaseRenderer.render_chat",
    name="chat",
    args=("conversations", "chat_params"),
    why="turns that the template writes anew are told from turns that the client changed",
)
def note_chat(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer.render_chat(conversations, chat_params): lays digests beside each rendered prompt."""
    outcome = wrapped(*args, **kwargs)
    if status.is_on("observe"):
        with failsafe("observe"):
            given = named(wrapped, args, kwargs)
            _lay_chat(given, outcome, _marks_of(instance, given["chat_params"].chat_template))
    return outcome


@hook(
    "vllm.renderers.base:BaseRenderer.render_chat_async",
    name="chat_async",
    args=("conversations", "chat_params"),
    why="as observe.chat, for the server",
)
async def note_chat_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer.render_chat_async; as note_chat."""
    outcome = await wrapped(*args, **kwargs)
    if status.is_on("observe"):
        with failsafe("observe"):
            given = named(wrapped, args, kwargs)
            _lay_chat(given, outcome, await _marks_of_async(instance, given["chat_params"].chat_template))
    return outcome


@hook(
    "vllm.renderers.base:BaseRenderer._process_multimodal",
    name="images",
    args=("mm_data", "mm_processor_kwargs"),
    why="whether an image was extracted and decoded is known here only",
)
def note_images(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._process_multimodal: lays notes on the images beside what the processor made of them."""
    if not status.is_on("observe"):
        return wrapped(*args, **kwargs)
    _processing.is_cached = None
    outcome = wrapped(*args, **kwargs)
    with failsafe("observe"):
        mm_data = argument(wrapped, args, kwargs, "mm_data")
        given = argument(wrapped, args, kwargs, "mm_processor_kwargs")
        cached = (_processing.is_cached or {}).get("image")
        outcome[_IMAGES] = _notes(mm_data.get("image"), given, cached)
    return outcome


@hook(
    "vllm.multimodal.processing.processor:BaseMultiModalProcessor._get_cache_missing_items",
    name="processor",
    why="hits of the processor cache are counted, but not by image",
)
def note_processor(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseMultiModalProcessor._get_cache_missing_items: which images the processor cache had."""
    outcome = wrapped(*args, **kwargs)
    _processing.is_cached = outcome[0]
    return outcome


@hook(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    name="send",
    args=("request_id", "prompt"),
    reads=("vllm.renderers:ChatParams",),
    why="what the API server saw must reach the engine, which compares requests of all API servers",
)
def send_notes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of InputProcessor.process_inputs(request_id, prompt): the notes travel with the request."""
    request = wrapped(*args, **kwargs)
    if status.is_on("observe"):
        with failsafe("observe"):
            prompt = argument(wrapped, args, kwargs, "prompt")
            RECORDER.model = _model_name(instance.vllm_config)
            text = _keep(instance.renderer, request, prompt if isinstance(prompt, dict) else {})
            request.trace_headers = wire.add(request.trace_headers, text)
    return request


@hook(
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    name="receive",
    args=("engine_core_outputs",),
    why="what the engine found must reach the API server that asked",
)
def receive(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of OutputProcessor.process_outputs(outputs): takes what the engine found, and digests of answers."""
    if not status.is_on("observe"):
        return wrapped(*args, **kwargs)
    outputs = argument(wrapped, args, kwargs, "engine_core_outputs")
    ended = []
    with failsafe("observe"):
        for output in outputs:
            if output.trace_headers:
                text, output.trace_headers = wire.take(output.trace_headers)
                if text is not None:
                    _keep_salt(instance.request_states.get(output.request_id), text)
                    RECORDER.note(text)
            if output.finish_reason is not None:
                ended.append(instance.request_states.get(output.request_id))
    outcome = wrapped(*args, **kwargs)
    with failsafe("observe"):
        for state in ended:
            salt = getattr(state, _SALT, None)
            if salt is not None and state.detokenizer is not None:
                RECORDER.note_answer(salt, state.detokenizer.output_text)
    return outcome


def _keep_salt(state: Any, outcome: str) -> None:
    """A request's state in vLLM lives until its answer ends; an answer is known again under its own salt alone."""
    salt = RECORDER.waiting.salt_of(wire.ticket_of(outcome))
    if state is not None and salt is not None:
        setattr(state, _SALT, salt)


def _lay_chat(given: Mapping[str, Any], outcome: Any, of_template: tuple[Marks | None, int]) -> None:
    """Lay digests beside each rendered prompt. of_template: see `_marks_of`."""
    conversations, chat_params = given["conversations"], given["chat_params"]
    marks, template_digest = of_template
    arguments = xxhash.xxh3_64_intdigest(_dumped(chat_params.chat_template_kwargs), template_digest)
    for conversation, prompt in zip(conversations, outcome[1], strict=True):
        digests, answers = _message_digests(conversation)
        prompt[_CHAT] = marks, [arguments, *digests], answers


def _keep(renderer: Any, request: Any, prompt: dict[str, Any]) -> str:
    """Keep what is known of a request until its outcome comes; returns what the engine is to know."""
    chat = prompt.pop(_CHAT, None)
    seen: Sequence[tuple[_Content, Layers]] = prompt.pop(_IMAGES, ())
    tokens, features = request.prompt_token_ids, request.mm_features or ()
    spans = [((at := f.mm_position).offset, at.length, f.identifier) for f in features]
    if len(seen) != len(spans):  # other modalities, too
        images = iter(seen)
        seen = [next(images, _NOTHING) if f.modality == "image" else _NOTHING for f in features]
    marks, messages, answers = chat or (_marks_of(renderer, None)[0], [], [])
    turns = marks.find(tokens, spans) if marks is not None and tokens is not None else []
    roles = marks.roles_of(tokens, turns) if marks is not None and turns else []
    lora, sampling = request.lora_request, request.sampling_params
    record_id = RECORDER.waiting.add(
        RequestSnapshot(
            request_id=request.request_id[:REQUEST_ID_CHARS],
            time_s=request.arrival_time,
            prompt_tokens=len(tokens) if tokens is not None else len(request.prompt_embeds),
            lora=lora.lora_name if lora else "",
            salt=salt_class(tenant.current(request.cache_salt)),
            num_answers=sampling.n if sampling is not None else 1,
            turns=turns,
            roles=roles,
            answers=answers,
            spans=spans,
            layers=[layers for _, layers in seen],
        )
    )
    notes = wire.Notes(turns, roles, messages, spans, [content for content, _ in seen])
    return wire.pack(record_id, request.request_id, notes)


_Content = tuple[str, str, int, int]  # as in wire.Notes
_NOTHING: tuple[_Content, Layers] = ("", "", 0, 0), UNKNOWN


def _notes(items: Any, given: Any, cached: Sequence[bool] | None) -> list[tuple[_Content, Layers]]:
    items = items if isinstance(items, list | tuple) else [items]
    processor_settings = xxhash.xxh3_64_hexdigest(repr(sorted(given.items()))) if given else ""
    processor = ["hit" if is_hit else "run" for is_hit in cached or ()]
    found = []
    item: Any
    for given_item, ran in itertools.zip_longest(items, processor[: len(items)], fillvalue="unknown"):
        item = given_item.opened if isinstance(given_item, EncodedImage) else given_item
        content_id = getattr(item, "content_id", None)
        if content_id is not None:  # it came through lazy_media
            media, content, body = item.media, content_id[:8].hex(), "lifted" if item.is_extracted else "left"
        else:
            media, content, body = getattr(item, "media", item), "", "left"
        if isinstance(media, LazyImage):
            decode = "late" if media.is_decoded else "skipped"
        else:
            decode = "unknown" if media is None else "decoded"
        ran = getattr(item, "processor", None) or ran  # of lazy_processing, before vLLM's cache was asked
        width, height = media.size if hasattr(media, "mode") else (0, 0)
        found.append(((content, processor_settings, width, height), (width, height, body, decode, ran)))
    return found


def _marks_of(renderer: Any, template: str | None) -> tuple[Marks | None, int]:
    """The marks of a chat template, and a digest of it. Those of the last templates are kept, not the templates."""
    known = _known_marks(renderer).get(_name_of(template))
    return _find_marks(renderer, template) if known is None else known


async def _marks_of_async(renderer: Any, template: str | None) -> tuple[Marks | None, int]:
    """As _marks_of, without blocking the event loop: unknown marks are found in a thread.

    A client's template can be one that takes for ever to render what it is probed with. So each request waits MARKS_S
    at most. From then on the template counts as one without marks, until its probe ends.
    """
    known, name = _known_marks(renderer), _name_of(template)
    if (noted := known.get(name)) is not None:
        return noted
    probed: dict[bytes, asyncio.Event] = renderer.__dict__.setdefault(_PROBED, {})
    if (found := probed.get(name)) is None:
        found = probed[name] = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end() -> None:
            probed.pop(name, None)
            found.set()

        def find() -> None:
            try:
                with failsafe("observe"):
                    _find_marks(renderer, template)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(end)

        if not _probing.submit(find):
            end()
    try:
        await asyncio.wait_for(found.wait(), MARKS_S)
    except TimeoutError:
        return _note_marks(renderer, template, None)
    return known.get(name) or (None, _digest_of(template))


def _find_marks(renderer: Any, template: str | None) -> tuple[Marks | None, int]:
    """As _marks_of, for a template that is not known yet. One that can't be probed is not probed with every request."""
    marks: Marks | None = None
    try:
        tokenizer = renderer.get_tokenizer()
        specials = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
        marks = find_marks(_renders_with(renderer, template), specials)
    finally:
        noted = _note_marks(renderer, template, marks)
    return noted


def _renders_with(renderer: Any, template: str | None) -> Callable[[Sequence[dict[str, str]], bool], list[int]]:
    """A function that renders messages as vLLM does, to token ids; `template` is the server's own, if it has one."""
    from vllm.renderers import ChatParams

    def render(messages: Sequence[dict[str, str]], opens_answer: bool) -> list[int]:
        params = ChatParams(template, chat_template_kwargs={"add_generation_prompt": opens_answer})
        prompt = renderer.render_messages(list(messages), params)[1]
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        return list(renderer.get_tokenizer().encode(prompt["prompt"], add_special_tokens=False))

    return render


def _name_of(template: str | None) -> bytes:
    return b"" if template is None else blake3(template.encode(errors="surrogatepass")).digest()


def _digest_of(template: str | None) -> int:
    return xxhash.xxh3_64_intdigest(repr(template))


def _note_marks(renderer: Any, template: str | None, marks: Marks | None) -> tuple[Marks | None, int]:
    noted = marks, _digest_of(template)
    _known_marks(renderer).replace(_name_of(template), noted)
    return noted


def _known_marks(renderer: Any) -> LruTable[bytes, tuple[Marks | None, int]]:
    """By digest of the template: clients may bring templates of their own, as many as they like."""
    known: LruTable[bytes, tuple[Marks | None, int]] | None = renderer.__dict__.get(_MARKS)
    if known is None:
        budget = Budget(MOST_TEMPLATES, MOST_TEMPLATES * TEMPLATE_COST_BYTES)
        known = renderer.__dict__[_MARKS] = LruTable(lambda: budget, TEMPLATE_COST_BYTES)
    return known


def _message_digests(conversation: Sequence[Any]) -> tuple[list[int], list[int | None]]:
    """Of each message; and of those of the assistant, None for one that calls tools and says nothing."""
    digests: list[int] = []
    answers: list[int | None] = []
    for message in conversation:
        role, content = message["role"], message.get("content")
        says = calls = None
        if content.__class__ is not str or "tool_calls" in message:
            says, calls = _text(content), message.get("tool_calls")
            content = f"{says}\0{calls!r}" if calls else says
        found = message_digest(role, content)
        digests.append(found)
        if role == "assistant":
            answers.append(None if calls and not (says or "").strip() else found)
    return digests, answers


def _text(content: Any) -> str:
    """The text of a message; one that is a list with a single text is the same to a template's user."""
    if isinstance(content, str):
        return content
    texts = (part if isinstance(part, str) else part.get("text") for part in content or ())
    return "\0".join(text or "" for text in texts)


def _dumped(value: Any) -> bytes:
    try:
        return marshal.dumps(value, 2)
    except ValueError:  # not only plain values
        return repr(value).encode(errors="replace")


def _model_name(vllm_config: Any) -> str:
    name = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)
