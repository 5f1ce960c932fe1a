# SPDX-License-Identifier: Apache-2.0
"""Asks an engine of vLLM for the audit: makes the requests, keeps nothing of them, and takes their answers.

Engine process, main thread. A cold request has a salt and names of images that nobody else has, and its KV is not
cached: its blocks are the first to be used again, so after the first one nothing of others has to go.
"""

import hashlib
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.request import Request, RequestStatus

from vllm_mmcache.audit.samples import Sample
from vllm_mmcache.base import engine_caches, status, uses
from vllm_mmcache.components.image_spans.spans import image_spans, keeps_images_whole
from vllm_mmcache.content import image_namer
from vllm_mmcache.exactness.distance import Logprobs, floor_of
from vllm_mmcache.lifecycle import config_rules

PREFIX = "mmcache-audit-"
"""Of the ids of the audit's requests."""
NUM_LOGPROBS = 20
STEP_TOKENS = 1024
"""Of the audit's own steps: a user's request that arrives in one waits for its end, as for that of any other."""
_HIT = "_mmcache_hit_tokens"
_HAS_OUTPUTS = "_mmcache_has_outputs"  # a request that finds an image's features in vLLM's encoder cache


class AuditedEngine:
    """One EngineCore, as the audit sees it."""

    def __init__(self, engine_core: Any, on_idle: Callable[[], None]) -> None:
        self._core: Any = weakref.proxy(engine_core)
        self._on_idle = on_idle
        vllm_config = engine_core.vllm_config
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        cache_dtype = str(vllm_config.cache_config.cache_dtype)
        self.floor = floor_of(dtype, cache_dtype not in ("auto", dtype))
        most = vllm_config.model_config.max_logprobs
        self._num_logprobs = NUM_LOGPROBS if most < 0 else min(NUM_LOGPROBS, most)
        self._step_tokens: int = engine_core.scheduler.max_num_scheduled_tokens
        self._block_tokens: int = engine_core.scheduler.kv_cache_manager.coordinator.scheduler_block_size
        self._number = 0

    def may_begin(self) -> bool:
        """Whether the engine has nothing to do, is awake, and nobody waits."""
        core = self._core
        queue = getattr(core, "input_queue", None)
        is_ending = hasattr(core, "is_running") and not core.is_running()
        return not (
            is_ending
            or core.scheduler.has_unfinished_requests()
            or (queue is not None and not queue.empty())
            or core.is_sleeping()
        )

    def ask(self, sample: Sample, run: uses.Run, *, hit_tokens: int | None = None) -> Any:
        """Put a request of the audit's own, which waits for the next step; returns it.

        hit_tokens: how many were cached for another one of the sample; this one is then computed in other chunks than
        without, where the engine allows it.
        """
        core, scheduler = self._core, self._core.scheduler
        self._number += 1
        is_warm = run == "warm"
        features = [
            replace(one, identifier=(name := secrets.token_hex(32)), mm_hash=name) if run == "cold" else replace(one)
            for one in sample.features
        ]
        request = Request(
            request_id=f"{PREFIX}{self._number}-{secrets.token_hex(8)}",
            prompt_token_ids=list(sample.token_ids),
            sampling_params=SamplingParams(
                max_tokens=1,
                temperature=0,
                seed=0,  # a request without one takes a number from the generator that users' requests go on with
                logprobs=self._num_logprobs,
                ignore_eos=True,
                detokenize=False,
            ),
            pooling_params=None,
            mm_features=features,
            cache_salt=sample.salt if is_warm else secrets.token_hex(32),
            block_hasher=core.request_block_hasher,
        )
        uses.mark(request, run)
        image_namer.set_namer(sample.namer, request)
        if is_warm and any(one.identifier in scheduler.encoder_cache_manager.cached for one in features):
            setattr(request, _HAS_OUTPUTS, True)
        scheduler.max_num_scheduled_tokens = self._limit(request, hit_tokens)
        if not is_warm:
            manager = scheduler.kv_cache_manager
            allocate = type(manager).allocate_slots.__get__(manager)

            def allocate_uncached(*args: Any, **kwargs: Any) -> Any:
                return allocate(*args, **{**kwargs, "delay_cache_blocks": True})

            def cache_nothing(*args: Any, **kwargs: Any) -> None:
                """In the place of KVCacheManager.cache_blocks, which async scheduling calls when a token has come."""

            manager.allocate_slots = allocate_uncached
            manager.cache_blocks = cache_nothing
        core.add_request(request)
        if (queue := getattr(core, "input_queue", None)) is not None:
            queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        return request

    def reused(self, request: Any) -> bool:
        """Whether it reused something of its images, or, without any, of its text."""
        has_features = "features" in uses.of(request) or hasattr(request, _HAS_OUTPUTS)
        return has_features or hit_of(request) > _first_image(request)

    def hit_of(self, request: Any) -> int:
        """The tokens that it found cached."""
        return hit_of(request)

    def ended(self, request: Any) -> None:
        """Nothing of it is kept: what was set for it is set back, and its images' encoder outputs are let go of."""
        scheduler = self._core.scheduler
        scheduler.max_num_scheduled_tokens = self._step_tokens
        for name in ("allocate_slots", "cache_blocks"):
            vars(scheduler.kv_cache_manager).pop(name, None)
        if uses.run_of(request) == "cold":
            identifiers = {feature.identifier for feature in request.mm_features}
            engine_caches.evict_outputs(scheduler.encoder_cache_manager, identifiers)

    def abort(self, request: Any) -> None:
        """End it now."""
        self._core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def expect_idle(self) -> None:
        """Have `on_idle` called when the engine has nothing to do the next time; vLLM asks each callback once."""
        callbacks = self._core._idle_state_callbacks
        if self._called not in callbacks:
            callbacks.append(self._called)

    def _called(self, engine_core: Any) -> None:
        self._on_idle()

    def _limit(self, request: Any, hit_tokens: int | None) -> int:
        """The most tokens of a step: whole blocks, enough for the longest image where images must be whole in a step.

        It is STEP_TOKENS or what images need, as far as the engine allows. With `hit_tokens` it is another number, so
        that chunks end in other places: half of the hit, or of the prompt if there was none. Where that gives the same
        number, it is half of that, and where images need more, a block more.
        """
        spans = image_spans(request) if keeps_images_whole(self._core.vllm_config) else []
        longest = max((last - first + 1 for first, last in spans), default=0)

        def limit_of(tokens: int) -> int:
            blocks = max(-(-tokens // self._block_tokens), 1)
            if longest:
                blocks = max(blocks, -(-longest // self._block_tokens) + 1)
            return min(self._step_tokens, blocks * self._block_tokens)

        most = limit_of(STEP_TOKENS)
        if hit_tokens is None:
            return most
        half = (hit_tokens or request.num_tokens) // 2
        others = map(limit_of, (min(half, most), most // 2, most + 1))
        return next((other for other in others if other != most), most)


def sample_of(request: Any, components: frozenset[str]) -> Sample | None:
    """What is needed to ask for a finished request's first token again; None where that is not to be had.

    Inputs that lie in shared memory may be overwritten; adapters would have to be loaded.
    """
    is_plain = request.prompt_token_ids is not None and request.prompt_embeds is None and request.lora_request is None
    datas = [feature.data for feature in request.mm_features]
    if not is_plain or request.resumable or any(data is None or "address" in data for data in datas):
        return None
    return Sample(
        name=hashlib.sha256(request.request_id.encode()).hexdigest()[:16],
        token_ids=tuple(request.prompt_token_ids),
        features=[replace(feature) for feature in request.mm_features],
        namer=image_namer.of(request),
        salt=request.cache_salt,
        components=components,
        hit_tokens=hit_of(request),
        num_bytes=sum(_num_bytes(data.get_data()) for data in datas),
        time_s=time.monotonic(),
    )


def _num_bytes(inputs: Any) -> int:
    """Of the inputs of an image: tensors, or bytes, in mappings and lists."""
    if isinstance(inputs, Mapping):
        return sum(map(_num_bytes, inputs.values()))
    if isinstance(inputs, list | tuple):
        return sum(map(_num_bytes, inputs))
    return len(inputs) if isinstance(inputs, bytes) else int(getattr(inputs, "nbytes", 0))


def note_reuse(request: Any, hit_tokens: int, vllm_config: Any) -> None:
    """Note what a prefix hit, or the model, says of the components that a request with images used."""
    setattr(request, _HIT, hit_tokens)
    if not request.mm_features:
        return
    if hit_tokens > _first_image(request) and status.is_on("block_keys"):
        uses.note(request, "block_keys")
    if keeps_images_whole(vllm_config):
        uses.note(request, "image_spans")


def hit_of(request: Any) -> int:
    """The tokens that a request's prefix hit had when it was looked up last."""
    return int(getattr(request, _HIT, 0))


def _first_image(request: Any) -> int:
    return min((int(feature.mm_position.offset) for feature in request.mm_features), default=0)


def logprobs_of(output: Any) -> Logprobs | None:
    """The log-probabilities of an EngineCoreOutput's one token; None where it has none."""
    found = output.new_logprobs
    if found is None or not len(found.logprobs):
        return None
    return dict(zip(found.logprob_token_ids[0].tolist(), found.logprobs[0].tolist(), strict=True))


def why_not(vllm_config: Any) -> str:
    """Why an engine of this configuration can't be audited; empty where it can."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model_config.runner_type != "generate" or model_config.max_logprobs == 0:
        return "it gives no log-probabilities"
    if reason := config_rules.why_not_compared(vllm_config):
        return reason
    if vllm_config.kv_transfer_config is not None or vllm_config.ec_transfer_config is not None:
        return "a connector would keep what the audit computes"
    if vllm_config.speculative_config is not None:
        return "not shown to be right with speculative decoding"
    if model_config.is_hybrid:
        return (
            "Mamba layers round otherwise where a step ends elsewhere, by more than the audit could tell from a fault"
        )
    if parallel.data_parallel_size > 1 and model_config.is_moe:
        return "its steps are those of all data-parallel engines"
    return ""
