# SPDX-License-Identifier: Apache-2.0
"""Drives an engine of vLLM for a trial, one request at a time, before it serves, and leaves nothing behind.

Engine process, its main thread. Requests go past the API server and the receiver cache of images; their outputs go to
nobody else, nor do statistics and KV events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from vllm.distributed.kv_events import NullEventPublisher
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_mmcache.base import uses
from vllm_mmcache.components.features.engine.hooks import connector_of
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.components.image_checkpoints.hooks import checkpoints_of, forget
from vllm_mmcache.components.image_spans.spans import image_spans, keeps_images_whole
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS
from vllm_mmcache.content import image_namer
from vllm_mmcache.exactness import distance
from vllm_mmcache.metrics import counters, table_sizes
from vllm_mmcache.metrics.transport import KEY
from vllm_mmcache.storage.tier_counts import TierCounts
from vllm_mmcache.trial import worker
from vllm_mmcache.trial.vllm_prompts import Prompt

NUM_TOKENS = 4
"""Of each answer: the first comes from the prefill, the others from steps that decode."""
NUM_LOGPROBS = 20


class TrialFailed(Exception):
    """The engine can't go on with the trial: the message says why."""


@dataclass(frozen=True)
class Reply:
    """What the engine answered, and how it came to it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    """By step: token -> log-probability, of the most likely ones."""
    num_cached_tokens: int
    """Of the prompt, that were reused."""
    stops: tuple[int, ...]
    """Where steps of the prefill ended, in tokens of the prompt; its end is left out. Of the last, if it began anew."""
    cuts: tuple[int, ...]
    """Where states were kept inside a step."""
    tower_images: int
    """Images that the vision tower ran for, in the rank that ran most."""
    tower_runs: int
    """How often the vision tower ran, whoever called it; 0 where the model's class does not tell."""
    checkpoints_used: int

    def part(self, first: int, end: int) -> Reply:
        """These of its tokens alone."""
        return replace(self, token_ids=self.token_ids[first:end], logprobs=self.logprobs[first:end])


@dataclass
class _Watch:
    """What is noted of the request that runs."""

    stops: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)


class TrialEngine:
    """An engine before its first user's request. Raises TrialFailed where it does not get to the end of a request."""

    def __init__(self, engine_core: Any, deadline: float) -> None:
        """`deadline` is a time of time.monotonic()."""
        self.core = engine_core
        self.scheduler = engine_core.scheduler
        self.vllm_config = engine_core.vllm_config
        self.num_requests = 0
        self.has_sent_counts = False
        """Whether statistics of a step had what a worker has counted."""
        self.attention: list[dict[str, Any]] = []
        """What comparisons of rows with the naive attention have seen."""
        self._deadline = deadline
        self._name = uuid4().hex[:12]

    @property
    def features(self) -> Any:
        """The store beside the scheduler; None where features are off."""
        return connector_of(self.scheduler)

    @property
    def block_tokens(self) -> int:
        """What hits end at multiples of."""
        return int(self.scheduler.kv_cache_manager.coordinator.scheduler_block_size)

    @property
    def floor(self) -> float:
        """What two right answers of this engine may differ by in any case."""
        dtype = str(self.vllm_config.model_config.dtype).removeprefix("torch.")
        return distance.floor_of(dtype, str(self.vllm_config.cache_config.cache_dtype) not in ("auto", dtype))

    @property
    def attends_with_image_spans(self) -> bool:
        """Whether attention over pictures is computed by the backend of image_spans, which is for CPUs alone."""
        return bool(current_platform.is_cpu())

    @property
    def is_over(self) -> bool:
        """Whether the trial's time is over."""
        return time.monotonic() > self._deadline

    def ask(
        self,
        prompt: Prompt,
        salt: str,
        pictures: str = "",
        stops: Sequence[int] = (),
        at_step: Callable[[Any, int], None] | None = None,
    ) -> Reply:
        """The answer to a prompt.

        salt: what its KV blocks are kept apart by. pictures: the same for its pictures; by default they are new ones.
        stops: where steps of the prefill have to end, as far as vLLM can end one there. at_step: called with the
        request and the number of tokens that it has answered, before each step.
        """
        request = self._request(prompt, salt, pictures)
        before = self._most(worker.tower_images), self._most(worker.tower_runs), counters.CHECKPOINTS_USED.value
        watch = _Watch()
        tokens: list[int] = []
        logprobs: list[dict[int, float]] = []
        cached: int | None = None
        with self._watching(request, watch, sorted(stops)):
            self.core.add_request(request)
            try:
                while self.core.scheduler.has_requests() or self.core.batch_queue:
                    if at_step is not None:
                        at_step(request, len(tokens))
                    for output in self._step():
                        if output.request_id == request.request_id:
                            tokens += output.new_token_ids
                            logprobs += _logprobs(output)
                            if output.prefill_stats is not None and cached is None:
                                cached = output.prefill_stats.num_cached_tokens
            finally:
                self._end(request)
        if len(tokens) != NUM_TOKENS or len(logprobs) != NUM_TOKENS:
            raise TrialFailed(f"a request ended after {len(tokens)} of {NUM_TOKENS} tokens")
        return Reply(
            tuple(tokens),
            tuple(logprobs),
            cached or 0,
            tuple(stop for stop in dict.fromkeys(watch.stops) if stop < len(prompt.token_ids)),
            tuple(watch.cuts),
            self._most(worker.tower_images) - before[0],
            self._most(worker.tower_runs) - before[1],
            int(counters.CHECKPOINTS_USED.value - before[2]),
        )

    @contextmanager
    def comparing_attention(self, prompt: Prompt) -> Iterator[None]:
        """Rows of the steps within, which are of this prompt alone, are compared with the naive attention."""
        spans = [span for feature in prompt.features for span in feature.mm_position.extract_embeds_range()]
        self._in_workers(worker.compare_attention, spans)
        try:
            yield
        finally:
            self.attention += [seen for seen in self._in_workers(worker.attention_compared) if seen is not None]

    def salt(self, name: str) -> str:
        """A salt that no user's request has; the same for the same name."""
        return f"mmcache trial {self._name} {name}"

    def forget_pictures(self) -> None:
        """Forget the outputs of the vision tower, but not what the store has of them."""
        self._wait_for_features()
        self.core.reset_encoder_cache()
        self._wait_for_features()

    def forget_kv(self, *, of_running: bool = False) -> None:
        """Forget all KV blocks; with `of_running` also those of the request that runs, which begins anew."""
        if not self.core.reset_prefix_cache(of_running):
            raise TrialFailed("the prefix cache could not be emptied")

    @contextmanager
    def small_steps(self, num_tokens: int) -> Iterator[None]:
        """Steps compute no more than so many tokens."""
        scheduler = self.scheduler
        most = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = min(most, num_tokens)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = most

    @contextmanager
    def without_checkpoints(self) -> Iterator[None]:
        """Requests get no checkpoints of ours, so none of them changes where a step ends."""
        checkpoints: Any = checkpoints_of(self.scheduler)
        if checkpoints is not None:
            checkpoints.plan = lambda *args, **kwargs: None
        try:
            yield
        finally:
            if checkpoints is not None:
                del checkpoints.plan

    @contextmanager
    def every_checkpoint_pays(self) -> Iterator[None]:
        """A checkpoint is made wherever one can be, as if it cost nothing."""
        checkpoints: Any = checkpoints_of(self.scheduler)
        if checkpoints is not None:
            checkpoints.cost_tokens = lambda *args, **kwargs: 0.0
        try:
            yield
        finally:
            if checkpoints is not None:
                del checkpoints.cost_tokens

    @contextmanager
    def leaving_nothing(self) -> Iterator[None]:
        """What the trial puts into caches, counts and says to others is gone after the block, or was never there."""
        scheduler, features = self.scheduler, self.features
        publisher = scheduler.kv_event_publisher
        scheduler.kv_event_publisher = NullEventPublisher()
        kept = counters.snapshot()
        self._in_workers(worker.keep_counts)
        try:
            with features.store.ram_alone() if features is not None else nullcontext():
                yield
        finally:
            try:
                self._abort_all()
                self.core.reset_prefix_cache()
                scheduler.kv_cache_manager.take_events()
                scheduler.make_stats()  # vLLM's own counts since the last statistics go with them
                self.forget_pictures()
            finally:
                scheduler.kv_event_publisher = publisher
                if (features := self.features) is not None:
                    features.store.ram.counts = TierCounts(FEATURES, features.store.ram.name)
                forget(scheduler)
                self._in_workers(worker.restore_counts)
                counters.restore(kept)
                table_sizes.send_again()

    def _request(self, prompt: Prompt, salt: str, pictures: str) -> Request:
        self.num_requests += 1
        number = f"{self._name}-{self.num_requests}"
        names = [f"mmcache-trial-{self._name}-{pictures or number}-{picture}" for picture in prompt.pictures]
        features = [
            replace(feature, identifier=name, mm_hash=name)
            for feature, name in zip(prompt.features, names, strict=True)
        ]
        request = Request(
            request_id=f"mmcache-trial-{number}",
            prompt_token_ids=list(prompt.token_ids),
            sampling_params=SamplingParams(
                max_tokens=NUM_TOKENS,
                min_tokens=NUM_TOKENS,
                temperature=0,
                seed=0,  # a request without one takes a number from the generator that users' requests go on with
                logprobs=NUM_LOGPROBS,
                ignore_eos=True,
            ),
            pooling_params=None,
            mm_features=features,
            cache_salt=salt,
            block_hasher=self.core.request_block_hasher,
        )
        uses.mark(request, "trial")
        image_namer.set_namer(image_namer.IDENTITY, request)  # names that the trial has made, each for one picture
        return request

    def _step(self) -> list[Any]:
        """One step of the engine's own; the outputs of all requests."""
        if self.is_over:
            raise TrialFailed("its time was over (the setting trial_s)")
        by_client, was_executed = self.core.step_fn()
        self.core.post_step(was_executed)
        for outputs in (by_client or {}).values():
            stats = outputs.scheduler_stats
            if stats is not None:
                self.has_sent_counts |= worker.PROBE in (stats.ec_connector_stats or {}).get(KEY, {})
        return [output for outputs in (by_client or {}).values() for output in outputs.outputs]

    @contextmanager
    def _watching(self, request: Request, watch: _Watch, stops: Sequence[int]) -> Iterator[None]:
        scheduler, left = self.scheduler, [stop for stop in stops if not self._is_inside_image(request, stop)]
        schedule, most = scheduler.schedule, scheduler.max_num_scheduled_tokens

        def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
            start = request.num_computed_tokens
            ahead = [stop for stop in left if stop > start]
            scheduler.max_num_scheduled_tokens = min([most, *(stop - start for stop in ahead)])
            try:
                step = schedule(*args, **kwargs)
            finally:
                scheduler.max_num_scheduled_tokens = most
            if ahead and not step.num_scheduled_tokens and not request.num_output_placeholders:
                left.remove(min(ahead))  # no step can end there
            if num_tokens := step.num_scheduled_tokens.get(request.request_id):
                end = request.num_computed_tokens
                if watch.stops and end <= watch.stops[-1]:  # it began anew
                    watch.stops.clear()
                watch.stops.append(end)
                cuts = getattr(step, CUTS, {}).get(request.request_id, ())
                watch.cuts += [end - num_tokens + cut.offset for cut in cuts]
            return step

        scheduler.schedule = schedule_and_note
        try:
            yield
        finally:
            del scheduler.schedule

    def _is_inside_image(self, request: Request, stop: int) -> bool:
        """Whether no step can end there, since an image is computed as a whole."""
        if not keeps_images_whole(self.vllm_config):
            return False
        return any(first < stop <= last for first, last in image_spans(request))

    def _end(self, request: Request) -> None:
        """Nothing of a request is under way any more."""
        if request.request_id in self.scheduler.requests:
            self._abort_all()
        if self.features is not None and not self.features.copying.wait(10):
            raise TrialFailed("features were not copied within 10 s")

    def _abort_all(self) -> None:
        if self.scheduler.requests:
            self.core.abort_requests(list(self.scheduler.requests))
        while self.scheduler.has_requests() or self.core.batch_queue:
            _, was_executed = self.core.step_fn()
            self.core.post_step(was_executed)

    def _wait_for_features(self) -> None:
        """Until what is being copied is, and all ranks know their weights: without that the store has nothing."""
        if (features := self.features) is not None:
            features.copying.wait(10)
            features.wait_until_known(max(0.0, self._deadline - time.monotonic()))

    def _most(self, count: Callable[[Any], int]) -> int:
        return max(self._in_workers(count), default=0)

    def _in_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return list(self.core.collective_rpc(function, args=args))


def _logprobs(output: Any) -> list[dict[int, float]]:
    """By step: token -> log-probability."""
    lists = output.new_logprobs
    if lists is None:
        return []
    steps = zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
    return [dict(zip(tokens, values, strict=True)) for tokens, values in steps]
