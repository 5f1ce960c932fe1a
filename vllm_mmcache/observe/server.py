# SPDX-License-Identifier: Apache-2.0
"""The API server's side of a record: what it sees of messages and images goes down with the request.

API server, or the offline program; event loop and the renderer's threads. Notes are laid beside what vLLM's renderer
returns and are taken away again when the engine's request is made, so that nothing is left of a request that fails.
Of text only digests are kept. It must never fail a request.
"""

import hashlib
import marshal
import threading
from collections.abc import Sequence
from typing import Any

from vllm_mmcache import events, settings
from vllm_mmcache.bounded import Bounded, Budget
from vllm_mmcache.media.picture import LazyPicture
from vllm_mmcache.observe import wire
from vllm_mmcache.observe.recorder import RECORDER
from vllm_mmcache.observe.turns import Marks, find_marks

_CHAT = "mmcache_chat"
_IMAGES = "mmcache_images"
_MARKS = "_mmcache_marks"
_ANSWER_COST_BYTES = 200
_REASONING_END = "</think>"

ANSWERS: Bounded[bytes, bool] = Bounded(lambda: Budget(65536, 16 << 20), _ANSWER_COST_BYTES)
"""Digests of the answers that this process gave."""
_processing = threading.local()


def note_chat(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer.render_chat(conversations, chat_params): lays digests beside each rendered prompt."""
    outcome = wrapped(*args, **kwargs)
    _lay_chat(instance, args, kwargs, outcome)
    return outcome


async def note_chat_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer.render_chat_async; as note_chat."""
    outcome = await wrapped(*args, **kwargs)
    _lay_chat(instance, args, kwargs, outcome)
    return outcome


def note_images(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseRenderer._process_multimodal: lays notes on the images beside what the processor made of them."""
    if not settings.current().observe:
        return wrapped(*args, **kwargs)
    _processing.is_cached = None
    outcome = wrapped(*args, **kwargs)
    with events.guarded("observe"):
        mm_data = kwargs["mm_data"] if "mm_data" in kwargs else args[1]
        given = kwargs["mm_processor_kwargs"] if "mm_processor_kwargs" in kwargs else args[3]
        cached = (_processing.is_cached or {}).get("image")
        outcome[_IMAGES] = _notes(mm_data.get("image"), given, cached)
    return outcome


def note_processor(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BaseMultiModalProcessor._get_cache_missing_items: which images the processor cache had."""
    outcome = wrapped(*args, **kwargs)
    _processing.is_cached = outcome[0]
    return outcome


def send_notes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of InputProcessor.process_inputs(request_id, prompt): the notes travel with the request."""
    request = wrapped(*args, **kwargs)
    if settings.current().observe:
        with events.guarded("observe"):
            prompt = args[1] if len(args) > 1 else kwargs["prompt"]
            RECORDER.model = _model_name(instance.vllm_config)
            asked = _asked(instance, request, prompt if isinstance(prompt, dict) else {})
            request.trace_headers = wire.add(request.trace_headers, wire.pack(asked))
    return request


def receive(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of OutputProcessor.process_outputs(outputs): takes what the engine found, and digests of answers."""
    if not settings.current().observe:
        return wrapped(*args, **kwargs)
    outputs = args[0] if args else kwargs["engine_core_outputs"]
    ended = []
    with events.guarded("observe"):
        for output in outputs:
            if output.trace_headers:
                text, output.trace_headers = wire.take(output.trace_headers)
                if text is not None:
                    RECORDER.note(text)
            if output.finish_reason is not None:
                ended.append(instance.request_states.get(output.request_id))
    outcome = wrapped(*args, **kwargs)
    with events.guarded("observe"):
        for state in ended:
            if state is not None and state.detokenizer is not None:
                _remember_answer(state.detokenizer.output_text)
    return outcome


def _lay_chat(renderer: Any, args: Any, kwargs: Any, outcome: Any) -> None:
    if not settings.current().observe:
        return
    with events.guarded("observe"):
        conversations = args[0] if args else kwargs["conversations"]
        chat_params = args[1] if len(args) > 1 else kwargs["chat_params"]
        marks = _marks_of(renderer, chat_params.chat_template)
        template = _digest_of(repr(chat_params.chat_template), _dumped(chat_params.chat_template_kwargs))
        for conversation, prompt in zip(conversations, outcome[1], strict=True):
            prompt[_CHAT] = marks, [template, *map(_message_digest, conversation)], _echoes(conversation)


def _asked(input_processor: Any, request: Any, prompt: dict[str, Any]) -> wire.Asked:
    chat = prompt.pop(_CHAT, None)
    notes = iter(prompt.pop(_IMAGES, ()))
    asked = wire.Asked(request.request_id, request.arrival_time)
    features = request.mm_features or []
    for feature in features:
        note = next(notes, None) if feature.modality == "image" else None
        asked.images.append(note or wire.ImageNote())
    marks, asked.messages, echoes = chat or (_marks_of(input_processor.renderer, None), [], [])
    tokens = request.prompt_token_ids
    if marks is None or tokens is None:
        return asked
    asked.turns = marks.find(tokens, ((f.mm_position.offset, f.mm_position.length) for f in features))
    asked.roles = [marks.role(tokens, turn) for turn in asked.turns]
    answers = [turn for turn, role in enumerate(asked.roles) if role == "assistant"]
    asked.echoes = [answers[index] for index in echoes if index < len(answers)]
    return asked


def _notes(items: Any, given: Any, cached: Sequence[bool] | None) -> list[wire.ImageNote]:
    items = items if isinstance(items, list | tuple) else [items]
    processor_settings = _digest_of(repr(sorted((given or {}).items())))
    notes = []
    for index, item in enumerate(items):
        note = wire.ImageNote(settings=processor_settings)
        if cached is not None and index < len(cached):
            note.processor = "hit" if cached[index] else "run"
        media = getattr(item, "media", item)
        note.width, note.height = getattr(media, "size", (0, 0)) if hasattr(media, "mode") else (0, 0)
        content_id = getattr(item, "content_id", None)
        if content_id is not None:
            note.content = content_id.hex()[:16]
        if isinstance(media, LazyPicture):
            note.decode = "late" if media.is_decoded else "skipped"
        elif media is not None:
            note.decode = "decoded"
        note.body = "lifted" if getattr(item, "is_lifted", False) else "left"
        notes.append(note)
    return notes


def _marks_of(renderer: Any, template: str | None) -> Marks | None:
    by_template: dict[str | None, Marks | None] = renderer.__dict__.setdefault(_MARKS, {})
    if template not in by_template:
        from vllm_mmcache.observe.vllm_side import probe

        by_template[template] = None  # also where the probe fails: it is not tried with every request
        tokenizer = renderer.get_tokenizer()
        specials = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
        by_template[template] = find_marks(probe(renderer, template), specials)
    return by_template[template]


def _message_digest(message: Any) -> str:
    """Role, text and tool calls; a text and a list with that one text are the same to a template's user."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [_part(part) for part in content or ()]
    return _digest_of(str(message.get("role")), *texts, repr(message.get("tool_calls") or ""))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    return str(part.get("text") or "") if isinstance(part, dict) else ""


def _echoes(conversation: Sequence[Any]) -> list[int]:
    """Which of the assistant's messages, from 0, are answers of this process."""
    answers = [message for message in conversation if message.get("role") == "assistant"]
    found = []
    for index, message in enumerate(answers):
        content = message.get("content")
        text = content if isinstance(content, str) else "".join(_part(part) for part in content or ())
        if ANSWERS.get(_answer_key(text)) or (not text.strip() and message.get("tool_calls")):
            found.append(index)
    return found


def _remember_answer(text: str) -> None:
    ANSWERS.admit(_answer_key(text), True)
    if _REASONING_END in text:
        ANSWERS.admit(_answer_key(text.rpartition(_REASONING_END)[2]), True)


def _answer_key(text: str) -> bytes:
    return hashlib.blake2b(text.strip().encode(errors="replace"), digest_size=16).digest()


def _digest_of(*texts: str | bytes) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    for text in texts:
        part = text if isinstance(text, bytes) else text.encode(errors="replace")
        hasher.update(b"%d:" % len(part))
        hasher.update(part)
    return hasher.hexdigest()


def _dumped(value: Any) -> bytes:
    try:
        return marshal.dumps(value, 2)
    except ValueError:  # not only plain values
        return repr(value).encode(errors="replace")


def _model_name(vllm_config: Any) -> str:
    name = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)
