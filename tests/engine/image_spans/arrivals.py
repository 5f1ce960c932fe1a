# SPDX-License-Identifier: Apache-2.0
"""Puts requests to an engine one by one and steps it by hand, so that one that waits for ever is seen to.

For tests; needs no pytest. The limits of a running engine are changed under it: an engine takes half a minute to start.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mmcache_tools.harness.engines import ZooRig
from vllm import SamplingParams

from vllm_mmcache.components.image_spans.spans import image_spans
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer, Message

_numbers = itertools.count()


@dataclass
class Arrival:
    """One request; its state: answered, refused when it arrived, ended by the engine, aborted, or still waiting."""

    request_id: str
    prompt: str
    images: tuple[Any, ...]
    refusal: str = ""
    answer: Answer | None = None
    finish_reason: str = ""
    arrived_at_step: int = 0
    first_token_at_step: int = -1
    done_at_s: float = -1.0

    @property
    def state(self) -> str:
        if self.refusal:
            return "refused"
        if self.finish_reason == "error":
            return "ended"
        if self.finish_reason == "abort":
            return "aborted"
        return "answered" if self.answer is not None else "waiting"


@dataclass
class Engine:
    """The engine of a rig, stepped by hand."""

    rig: ZooRig
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    num_steps: int = 0

    @property
    def engine(self) -> Any:
        return self.rig.llm.llm_engine

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def put(self, *messages: Message, max_tokens: int = 4) -> Arrival:
        prompt, images = self.rig.render(messages)
        one = Arrival(f"arrival-{next(_numbers)}", prompt, images, arrived_at_step=self.num_steps)
        asked: Any = {"prompt": prompt, "multi_modal_data": {"image": list(images)}} if images else {"prompt": prompt}
        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
        try:
            self.arrivals[self.engine.add_request(one.request_id, asked, params)] = one
        except ValueError as error:
            one.refusal = str(error)
        return one

    def step(self) -> None:
        self.num_steps += 1
        for output in self.engine.step():
            one = next(a for a in self.arrivals.values() if a.request_id == output.request_id)
            said = output.outputs[0]
            if said.token_ids and one.first_token_at_step < 0:
                one.first_token_at_step = self.num_steps
            if not output.finished:
                continue
            one.finish_reason, one.done_at_s = str(said.finish_reason), time.monotonic()
            if one.finish_reason != "error":
                one.answer = Answer(
                    prompt=one.prompt,
                    images=one.images,
                    prompt_ids=tuple(output.prompt_token_ids),
                    token_ids=tuple(said.token_ids),
                    logprobs=tuple({i: e.logprob for i, e in step.items()} for step in said.logprobs),
                    num_cached_tokens=output.num_cached_tokens,
                    text=said.text,
                )

    def until_done(self, ones: Sequence[Arrival], limit_s: float) -> None:
        """Step until all these are settled, or limit_s seconds are over."""
        ends = time.monotonic() + limit_s
        while any(one.state == "waiting" for one in ones) and time.monotonic() < ends:
            self.step()

    def abort(self, *ones: Arrival) -> None:
        """As when clients go away."""
        self.engine.abort_request([i for i, one in self.arrivals.items() if one in ones], internal=True)
        for one in ones:
            one.finish_reason = "abort"

    def clear(self) -> None:
        """Abort whatever is left, and let the steps end that were scheduled ahead."""
        self.abort(*(one for one in self.arrivals.values() if one.state == "waiting"))
        core = self.engine.engine_core.engine_core
        while self.engine.has_unfinished_requests() or core.batch_queue:
            self.engine.step()

    def span_tokens(self, *messages: Message) -> int:
        """The longest span of a conversation, as the scheduler sees it."""
        spans: list[int] = []
        add = self.scheduler.add_request

        def see(request: Any) -> None:
            spans.extend(last - first + 1 for first, last in image_spans(request))
            add(request)

        self.scheduler.add_request = see
        try:
            self.until_done([self.put(*messages, max_tokens=1)], 60)
        finally:
            del self.scheduler.add_request
        return max(spans)


@contextmanager
def limited(rig: ZooRig, **values: int) -> Iterator[Engine]:
    """The engine with these settings of vLLM's scheduler, and as it was afterwards."""
    engine = Engine(rig)
    scheduler = engine.scheduler
    configs = {id(c): c for c in (scheduler.scheduler_config, rig.llm.llm_engine.vllm_config.scheduler_config)}
    before = {name: getattr(scheduler.scheduler_config, name) for name in values}

    def put(settings: dict[str, Any]) -> None:
        for config in configs.values():
            for name, value in settings.items():
                setattr(config, name, value)
        config = scheduler.scheduler_config
        scheduler.max_num_scheduled_tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens

    put(values)
    try:
        yield engine
    finally:
        engine.clear()
        put(before)
