# SPDX-License-Identifier: Apache-2.0
"""Keeps the scheduler from splitting the span of a bidirectional image, and gives it a step in the end.

Engine process, scheduler thread.

Wraps the one place where vLLM decides how much of a request with images goes into a step. Also lets go of an encoder
output as soon as its last embedding is computed: vLLM holds it to the end of the placeholder range, and Gemma 3's
ranges overlap by a newline token, so two adjacent images with a small encoder cache waited for each other for ever.

A request that waits for a step large enough gets one of its own now and then, since vLLM serves running requests first,
and 0.33 lets newer ones pass. An exception there would end the engine; so none is raised.
"""

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument, named
from vllm_mmcache.components.image_spans.limits import why_never
from vllm_mmcache.components.image_spans.spans import image_spans, keeps_images_whole, last_embedding, whole_spans
from vllm_mmcache.components.image_spans.step_limits import engine_limits, items_of
from vllm_mmcache.components.image_spans.waiting import Waiting
from vllm_mmcache.hooking import subclasses
from vllm_mmcache.hooking.hook import Hooks

logger = init_logger("vllm.mmcache.admission")

BLOCKED = "_mmcache_blocked"  # on the scheduler: the first request that this step had no room for


hook = Hooks(
    "image_spans",
    "engine",
    upstream="none yet",
)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs",
    name="atomic",
    args=("request", "num_computed_tokens", "num_new_tokens"),
    why="a chunk that ends inside a bidirectional image gives wrong KV, cached under the right key",
    upstream="52306; 0.33 covers a chunk that starts on the image, not a prefix hit inside it",
    remove_when="vLLM never splits such a span",
)
def never_split_spans(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._try_schedule_encoder_inputs: the same answer for a chunk that splits no span."""
    if not keeps_images_whole(instance.vllm_config):
        return wrapped(*args, **kwargs)
    given = named(wrapped, args, kwargs)
    request, start, asked = given["request"], given["num_computed_tokens"], given["num_new_tokens"]
    spans = image_spans(request)
    fits = whole_spans(start, asked, spans)
    is_blocked = fits == 0 < asked
    while True:
        answer = wrapped(**given | {"num_new_tokens": fits})
        fits = whole_spans(start, answer[1], spans)
        if fits == answer[1]:
            break
    if fits == 0 < asked and not is_blocked:
        ahead = given.get("shift_computed_tokens", 0)
        # vLLM splits no item either, with disable_chunked_mm_input.
        ends = [i.first + i.num_tokens for i in items_of(request.mm_features) if i.first <= start + ahead]
        is_blocked = any(end > start + max(ahead, asked) for end in ends)
    if is_blocked and getattr(instance, BLOCKED, None) is None:
        setattr(instance, BLOCKED, request.request_id)
    return answer


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._free_encoder_inputs",
    name="free",
    args=("request",),
    why="adjacent images whose ranges overlap wait for each other for ever in a small encoder cache",
    remove_when="vLLM frees an encoder output after its last embedding",
)
def free_after_last_embedding(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._free_encoder_inputs: also frees outputs whose embeddings are all computed."""
    outcome = wrapped(*args, **kwargs)
    request = argument(wrapped, args, kwargs, "request")
    if not keeps_images_whole(instance.vllm_config):
        return outcome
    # The next chunk's drafter begins to read one token behind where the chunk does; of several heads, the last one.
    read_again = max(0, instance.num_prefill_lookahead - 1)
    computed = request.num_computed_tokens - request.num_output_placeholders - read_again
    for input_id in list(instance.encoder_cache_manager.get_cached_input_ids(request)):
        if last_embedding(request.mm_features[input_id]) < computed:
            instance._free_encoder_input(request, input_id)
    return outcome


@hook(
    "vllm.v1.core.sched.scheduler:get_mm_features_in_window",
    name="window",
    args=("mm_features", "start", "end"),
    why="the scheduler asks again for an image of which only trailing text is left",
    remove_when="vLLM leaves out images whose embeddings are all computed",
)
def skip_computed_images(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of get_mm_features_in_window as the scheduler sees it: leaves out images that need nothing more.

    An image whose last embedding lies before the window overlaps it with text only, so its output isn't needed again.
    """
    lo, hi = wrapped(*args, **kwargs)
    if lo == hi or not status.is_on("image_spans"):
        return lo, hi
    mm_features: Sequence[Any] = argument(wrapped, args, kwargs, "mm_features")
    start = argument(wrapped, args, kwargs, "start")
    while lo < hi and last_embedding(mm_features[lo]) < start:
        lo += 1
    return lo, hi


_WAITING = "_mmcache_waiting"
_OF_IMAGES = ("_try_schedule_encoder_inputs", "_free_encoder_inputs")
"""Methods that vLLM calls in each step for each request with images, also where only its answer goes on."""


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    name="turns",
    args=("throttle_prefills",),
    why="running requests leave a long span no room; 0.32 holds up all behind it, 0.33 lets newer ones pass it",
    remove_when="vLLM reserves room for an input that must not be split",
)
def schedule_fairly(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.schedule: a span that the other running requests leave no room for gets a step in the end.

    The others rest for that one step, as vLLM lets them itself with pipeline parallelism. Bounded: see Waiting.
    In a step in which only answers go on, no image is ahead, and vLLM's own methods are called.
    """
    subclasses.bypass(instance, _OF_IMAGES, _only_answers_go_on(instance))
    if not keeps_images_whole(instance.vllm_config):
        return wrapped(*args, **kwargs)
    waiting: Waiting | None = getattr(instance, _WAITING, None)
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


def _only_answers_go_on(scheduler: Any) -> bool:
    """Whether the prompts of all requests are computed; what waits may come into the step."""
    running = scheduler.running
    return len(scheduler.requests) == len(running) and all(
        request.num_computed_tokens >= request.num_prompt_tokens for request in running
    )


def _can_rest(scheduler: Any) -> bool:
    # Drafts of the step before stay on the device, for the requests of that step alone.
    return not (scheduler.num_spec_tokens and scheduler.scheduler_config.async_scheduling)
