# SPDX-License-Identifier: Apache-2.0
"""Refuses a request whose image no step can hold, when it arrives. API process.

Where a request becomes the engine's, and before a stream of answers begins, so that the client gets an error 400 and
nobody else notices; at start, where every image of the model is too long.
"""

from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger
from vllm.multimodal.utils import argsort_mm_positions
from vllm.platforms import current_platform

from vllm_mmcache.base import settings
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.errors import CausalImages, UnschedulableImage, UnschedulableRequest
from vllm_mmcache.components.image_spans import rules
from vllm_mmcache.components.image_spans.limits import too_long, why_never
from vllm_mmcache.components.image_spans.spans import image_spans, keeps_images_whole
from vllm_mmcache.components.image_spans.step_limits import items_of, limits_of, step_limits
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.models.vllm_registry import images_of

logger = init_logger("vllm.mmcache.admission")


hook = Hooks(
    "image_spans",
    "api",
)


@hook(
    "vllm.v1.engine.input_processor:InputProcessor._validate_model_inputs",
    name="refuse",
    args=("decoder_input",),
    reads=("vllm.multimodal.utils:argsort_mm_positions",),
    why="a span longer than a step waits for ever, in 0.32 with everyone behind it",
    upstream="none yet; encoder_budget compares the longest item of the model with max_num_batched_tokens alone",
    remove_when="vLLM refuses what a step can't hold, by each of its limits",
)
def refuse_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of InputProcessor._validate_model_inputs. Raises: UnschedulableRequest, which is a ValueError."""
    outcome = wrapped(*args, **kwargs)
    _refuse(instance, argument(wrapped, args, kwargs, "decoder_input"))
    return outcome


@hook(
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    name="refuse_stream",
    args=("prompt",),
    why="what is raised there reaches a client that streams after the status 200",
    upstream="none yet",
    remove_when="vLLM makes the engine's request before it begins to stream",
)
def refuse_before_stream(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of AsyncLLM.generate, an async generator: what it raises itself comes after the status 200 of a stream.

    Raises: UnschedulableRequest when it is called, not when it is first awaited.
    """
    _refuse(instance.input_processor, argument(wrapped, args, kwargs, "prompt"))
    return wrapped(*args, **kwargs)


def refuse_unservable(vllm_config: Any) -> None:
    """Where no image would ever be computed, or each wrongly, an error before the engine is started.

    Raises: UnschedulableImage naming the settings of vLLM that are too small; CausalImages where images would run
    causally, silently wrong.
    """
    if keeps_images_whole(vllm_config):
        model_config = vllm_config.model_config
        images = images_of(model_config)
        causal = rules.refusal(model_config, images, current_platform.is_cpu())
        if causal and not settings.current().allow_causal_images:
            raise CausalImages(causal)
        span = images.num_tokens(model_config.hf_config) if images is not None else 0
        if reason := too_long(span, step_limits(vllm_config)):
            raise UnschedulableImage(
                f"every image of this model has {span} tokens that must be computed in one step: {reason}"
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
    spans = image_spans(SimpleNamespace(mm_features=features))
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
