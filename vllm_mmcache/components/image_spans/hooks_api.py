# SPDX-License-Identifier: Apache-2.0
"""Refuses a request whose image no step can hold, when it arrives, and gives the others their turn.

API processes: where a request becomes the engine's, and before a stream of answers begins, so that the client gets an
error 400 and nobody else notices; at start, where every image of the model is too long. Engine process, scheduler
thread: a request that waits for a step large enough gets one of its own now and then, since vLLM serves running
requests first, and 0.33 lets newer ones pass. An exception there would end the engine; so none is raised.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from packaging.version import Version
from vllm.logger import init_logger
from vllm.multimodal.utils import argsort_mm_positions
from vllm.platforms import current_platform

from vllm_mmcache.base import settings
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.errors import CausalImages, UnschedulableImage, UnschedulableRequest
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.image_spans import rules
from vllm_mmcache.components.image_spans.hooks_engine import BLOCKED, image_spans, keeps_images_whole
from vllm_mmcache.components.image_spans.limits import Item, Limit, Limits, too_long, why_never
from vllm_mmcache.components.image_spans.waiting import Waiting

logger = init_logger("vllm.mmcache.admission")

_WAITING = "_mmcache_waiting"
_FROM_0_33 = Version(vllm_version()) >= Version("0.33")


def refuse_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of InputProcessor._validate_model_inputs. Raises: UnschedulableRequest, which is a ValueError."""
    outcome = wrapped(*args, **kwargs)
    _refuse(instance, argument(wrapped, args, kwargs, "decoder_input"))
    return outcome


def refuse_before_stream(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of AsyncLLM.generate, an async generator: what it raises itself comes after the status 200 of a stream.

    Raises: UnschedulableRequest when it is called, not when it is first awaited.
    """
    _refuse(instance.input_processor, argument(wrapped, args, kwargs, "prompt"))
    return wrapped(*args, **kwargs)


def refuse_endless(vllm_config: Any) -> None:
    """Where no image would ever be computed, or each wrongly, an error before the engine is started.

    Raises: UnschedulableImage naming the settings of vLLM that are too small; CausalImages where images would run
    causally, silently wrong.
    """
    if keeps_images_whole(vllm_config):
        model_config = vllm_config.model_config
        causal = rules.refusal(model_config, current_platform.is_cpu())
        if causal and not settings.current().allow_causal_images:
            raise CausalImages(causal)
        span = fixed_span(model_config.hf_config)
        if reason := too_long(span, step_limits(vllm_config)):
            raise UnschedulableImage(
                f"every image of this model has {span} tokens that must be computed in one step: {reason}"
            )


def take_turns(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.schedule: a span that the other running requests leave no room for gets a step in the end.

    The others rest for that one step, as vLLM lets them itself with pipeline parallelism. Bounded: see Waiting.
    """
    if not keeps_images_whole(instance.vllm_config):
        return wrapped(*args, **kwargs)
    waiting: Waiting | None = vars(instance).get(_WAITING)
    if waiting is None:
        waiting = Waiting()
        setattr(instance, _WAITING, waiting)
    throttled = argument(wrapped, args, kwargs, "throttle_prefills")
    request = instance.requests.get(waiting.request_id)
    if request is not None and not throttled and waiting.is_due():
        limits = engine_limits(instance)
        if reason := why_never(image_spans(request), items_of(request.mm_features), limits):
            # Only what came past the API server's check, as with another front end. vLLM ends such requests itself.
            logger.error("mmcache: request %s can't be computed and is ended: %s", request.request_id, reason)
            instance.encoder_cache_mismatch_reqs.add(request.request_id)
        elif _can_rest(instance):
            for other in instance.running:
                if other is not request:
                    # current_step grows by one first thing in the step.
                    other.next_decode_eligible_step = max(other.next_decode_eligible_step, instance.current_step + 2)
    setattr(instance, BLOCKED, None)
    output = wrapped(*args, **kwargs)
    waiting.stepped(getattr(instance, BLOCKED), output.num_scheduled_tokens)
    return output


def fixed_span(hf_config: Any) -> int:
    """The tokens of each image of a model whose images all have the same number; 0 of any other model."""
    if hf_config.model_type == "gemma3":
        return int(hf_config.mm_tokens_per_image)
    if hf_config.model_type == "paligemma":
        vision = hf_config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2)
    return 0


def step_limits(vllm_config: Any) -> tuple[Limit, ...]:
    """What bounds the tokens of a request in a step, each with the name by which it is set."""
    config, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    drafts = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
    limits = [Limit("max_num_batched_tokens", config.max_num_batched_tokens, drafts)]
    if config.max_num_scheduled_tokens is not None:
        limits.append(Limit("max_num_scheduled_tokens", config.max_num_scheduled_tokens))
    if config.long_prefill_token_threshold > 0:
        # vLLM lifts it for a request that is alone, and nobody can count on that. Its adaptive form falls to it, too.
        limits.append(Limit("long_prefill_token_threshold", config.long_prefill_token_threshold))
    window = vllm_config.model_config.get_sliding_window()
    if window and not (_FROM_0_33 or settings.current().allow_causal_images) and vllm_config.use_v2_model_runner:
        # It leaves longer images out of the spans even where the model clamps them (Gemma 4): they would run causally.
        limits.append(Limit("sliding_window, with model runner V2 of vLLM 0.32,", window))
    return tuple(limits)


def limits_of(vllm_config: Any, encoder_embeddings: int) -> Limits:
    """The limits of an engine with this configuration; encoder_embeddings is the size of its encoder cache."""
    lookahead = vllm_config.num_prefill_lookahead_tokens
    # 0.32 ends a step before an item that has no room by the drafter's lookahead too early, so inside the span before
    # it; and it does split an item where a step begins on it, which it does unless that lookahead comes between.
    whole = vllm_config.scheduler_config.disable_chunked_mm_input and (_FROM_0_33 or lookahead > 0)
    return Limits(
        step_limits(vllm_config), encoder_embeddings, 0 if _FROM_0_33 else lookahead, lookahead if whole else None
    )


def engine_limits(scheduler: Any) -> Limits:
    """The limits that a scheduler goes by."""
    cache_size = scheduler.encoder_cache_manager.cache_size
    return limits_of(scheduler.vllm_config, min(cache_size, scheduler.max_num_encoder_input_tokens))


def items_of(features: Iterable[Any]) -> list[Item]:
    """The images of a request, in its order, and whatever else has embeddings."""
    found = []
    for feature in features:
        position = feature.mm_position
        found.append(Item(position.offset, position.length, position.get_num_embeds(), feature.identifier))
    return found


def as_scheduled(features: Sequence[Any], prompt_token_ids: Sequence[int] | None) -> Any:
    """What the one function that knows where spans are, image_spans, wants to see of a request."""
    return SimpleNamespace(
        mm_features=features, prompt_token_ids=prompt_token_ids, num_prompt_tokens=len(prompt_token_ids or ())
    )


def _refuse(input_processor: Any, prompt: Any) -> None:
    """`prompt` is what vLLM's renderer made of it; one of another form passes, and comes again when it is rendered."""
    if (
        not isinstance(prompt, dict)
        or prompt.get("type") != "multimodal"
        or not keeps_images_whole(input_processor.vllm_config)
    ):
        return
    positions, names = prompt["mm_placeholders"], prompt["mm_hashes"]
    features = [
        SimpleNamespace(modality=modality, mm_position=positions[modality][i], identifier=names[modality][i])
        for modality, i in argsort_mm_positions(positions)
    ]
    spans = image_spans(as_scheduled(features, prompt["prompt_token_ids"]))
    limits = limits_of(input_processor.vllm_config, input_processor.mm_encoder_cache_size)
    if reason := why_never(spans, items_of(features), limits):
        _forget(input_processor.renderer.mm_processor_cache, prompt)
        raise UnschedulableRequest(f"{reason}. Send a smaller image, or raise the setting on the server.")


def _forget(cache: Any, prompt: Any) -> None:
    """What this process has processed for a refused prompt never reaches the engine's half of the processor cache.

    If it stayed in this half, the next request with one of these images would be sent without it, and fail with a 500.
    """
    for modality, names in prompt["mm_hashes"].items() if cache is not None else ():
        for name, item in zip(names, prompt["mm_kwargs"][modality], strict=True):
            if item is not None:  # else the engine has it already
                cache.invalidate(name)


def _can_rest(scheduler: Any) -> bool:
    # Drafts of the step before stay on the device, for the requests of that step alone.
    return not (scheduler.num_spec_tokens and scheduler.scheduler_config.async_scheduling)
