# SPDX-License-Identifier: Apache-2.0
"""Decides what the audit of one engine asks, when, and what its answers say. Engine process, main thread; no vLLM.

A sample is asked for one token: warm, as its request was, with all that is cached; then cold, with nothing. Where the
two are further apart than any two right answers, it is asked cold once more, in other chunks: what the engine can't
repeat itself is no mistake of a component. What is wrong then is looked for: with the features of its images alone.

One request of the audit's own at a time, only while the engine has nothing else, and it is aborted as soon as it has.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from vllm_mmcache.audit.samples import Sample, Samples
from vllm_mmcache.base import settings, status, uses
from vllm_mmcache.exactness.distance import Logprobs, between_steps, bound_of
from vllm_mmcache.metrics import counters

logger = logging.getLogger("vllm.mmcache")

LONGEST_RUN_S = 30.0
"""One that takes longer is given up: an engine that can't schedule it would try for ever."""
FOUND_WRONG = "answers in the audit were not those of cold runs"
"""How the reason of a component ends that the audit has switched off; docker/alerts.yaml looks for it."""

Which = Literal["warm", "cold", "cold_again", "features"]
Result = counters.AuditResult


class Engine(Protocol):
    """What the audit needs of an engine (vllm_requests.py)."""

    floor: float

    def may_begin(self) -> bool:
        """Whether the engine has nothing to do, and may be asked."""

    def ask(self, sample: Sample, run: uses.Run, *, hit_tokens: int | None = None) -> Any:
        """Put a request of the audit's own; returns it. hit_tokens: where another one of the sample was divided."""

    def reused(self, request: Any) -> bool:
        """Whether it reused something of its images, or, without any, of its text."""

    def hit_of(self, request: Any) -> int:
        """The tokens that it found cached."""

    def ended(self, request: Any) -> None:
        """It has ended, or was aborted: nothing of it is kept."""

    def abort(self, request: Any) -> None:
        """End it now."""

    def expect_idle(self) -> None:
        """Have `Auditor.on_idle` called when the engine has nothing to do the next time."""


@dataclass
class Audit:
    """The audit of one sample, under way."""

    sample: Sample
    begun_s: float
    which: Which = "warm"
    request: Any = None
    answers: dict[Which, Logprobs] = field(default_factory=dict)
    is_reusing: bool = False
    """Whether the warm request reused what its own images had left."""
    warm_uses: frozenset[str] = frozenset()
    hit_tokens: int = 0
    """Of the warm request."""


class Auditor:
    """The audit of one engine. All methods: main thread, `on_output` in a step and the others between two."""

    def __init__(self, engine: Engine, switch_off: Callable[[str, str], None]) -> None:
        """switch_off is called with a component and a reason."""
        self._engine = engine
        self._switch_off = switch_off
        self._draw = random.Random().random
        self._samples = Samples()
        self._audit: Audit | None = None
        self._mismatches: Counter[str] = Counter()
        self._to_switch_off: dict[str, str] = {}
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._audit_s = 0.0
        self.num_cut = 0
        """Audits that were aborted for something else."""

    def on_work(self) -> None:
        """A user's request arrives, or something else is asked of the engine: it comes first."""
        self._settle()
        if self._audit is not None:
            self._engine.abort(self._audit.request)
            self._cut()
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._engine.expect_idle()

    def on_finished(self, request: Any, sample_of: Callable[[frozenset[str]], Sample | None]) -> None:
        """A user's request has its answer. sample_of makes a sample of it, where it can be asked again."""
        for dropped in self._samples.take_old(time.monotonic()):  # an engine may have something to do for hours
            _count(dropped.components, "cut")
        components = frozenset(one for one in uses.of(request) if status.is_on(one))
        if not components or self._draw() >= settings.current().audit:
            return
        sample = sample_of(components)
        if sample is None:
            _count(components, "unavailable")
        elif self._samples.has_room(sample.num_bytes):
            self._samples.add(sample)
        else:
            _count(components, "cut")

    def on_idle(self) -> None:
        """The engine has nothing to do: audit something, if there is something and it may take the time."""
        now = time.monotonic()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None
        self._settle()
        if self._audit is not None or not self._samples:
            return
        is_time_up = self._audit_s > settings.current().audit_time * self._busy_s
        for dropped in self._samples.take_all() if is_time_up else self._samples.take_old(now):
            _count(dropped.components, "cut")
        if not self._samples or not self._engine.may_begin():
            return
        sample = self._samples.take()
        if sample is not None and any(map(status.is_on, sample.components)):
            self._audit = Audit(sample, now)
            self._ask("warm")

    @property
    def is_asking(self) -> bool:
        """Whether a request of the audit's own is in the engine."""
        return self._audit is not None

    def is_own(self, request_id: str) -> bool:
        """Whether a request is the audit's own, which is being computed."""
        return self._audit is not None and self._audit.request.request_id == request_id

    def on_output(self, logprobs: Logprobs | None) -> None:
        """The audit's request has its token, with these log-probabilities; None where it has failed."""
        audit = self._audit
        if audit is None:
            return
        self._end()
        if logprobs is None:
            self._cut()
            return
        audit.answers[audit.which] = logprobs
        if audit.which == "warm":
            audit.is_reusing = self._engine.reused(audit.request)
            audit.warm_uses = uses.of(audit.request)
            audit.hit_tokens = self._engine.hit_of(audit.request)
        self._go_on(audit)
        self._engine.expect_idle()

    def on_step(self) -> None:
        """A step has ended. One that does not get on is given up."""
        audit = self._audit
        if audit is not None and time.monotonic() - audit.begun_s > LONGEST_RUN_S:
            self._engine.abort(audit.request)
            self._cut()

    def on_lost(self, request: Any) -> None:
        """A request of the audit's own was ended by somebody else."""
        if self._audit is not None and self._audit.request is request:
            self._cut()

    def _go_on(self, audit: Audit) -> None:
        """What the answers so far say, or what is to be asked next."""
        warm, cold = audit.answers.get("warm"), audit.answers.get("cold")
        if warm is None or not audit.is_reusing:
            self._conclude("unavailable")  # what it used is not there any more
        elif cold is None:
            self._ask("cold")
        elif (apart := between_steps(warm, cold)) <= self._engine.floor:
            self._conclude("match")
        elif (again := audit.answers.get("cold_again")) is None:
            self._ask("cold_again")
        elif apart <= (bound := bound_of(self._engine.floor, between_steps(cold, again))):
            self._conclude("match")
        elif "features" not in audit.sample.components:
            self._blame(_nearest(audit.sample.components), apart, bound)
        elif (with_features := audit.answers.get("features")) is None:
            self._ask("features")
        else:
            others = (audit.sample.components | audit.warm_uses) - {"features"}
            is_of_features = not others or between_steps(with_features, cold) > bound
            self._blame("features" if is_of_features else _nearest(others), apart, bound)

    def _ask(self, which: Which) -> None:
        audit = self._audit
        assert audit is not None
        audit.which = which
        run: uses.Run = "cold" if which == "cold_again" else which
        audit.request = self._engine.ask(
            audit.sample, run, hit_tokens=audit.hit_tokens if which == "cold_again" else None
        )

    def _conclude(self, result: Result) -> None:
        audit = self._audit
        if audit is not None:
            self._leave()
            _count(audit.sample.components, result)

    def _blame(self, component: str, apart: float, bound: float) -> None:
        audit = self._audit
        assert audit is not None
        self._leave()
        _count([component], "mismatch")
        self._mismatches[component] += 1
        logger.warning(
            "mmcache: the audit found an answer that is not that of a cold run: request %s, which %s gave something; "
            "%.2g of the probability lies elsewhere, where %.2g may; %s",
            audit.sample.name,
            component,
            apart,
            bound,
            audit.sample.describe(),
        )
        number = self._mismatches[component]
        if number >= settings.current().audit_mismatches:
            self._to_switch_off[component] = f"{number} {FOUND_WRONG}"

    def _settle(self) -> None:
        """Between steps, and while there are none of the audit's own requests: switch off what was found wrong."""
        while self._to_switch_off:
            component, reason = self._to_switch_off.popitem()
            if status.is_on(component):
                logger.error("mmcache: %s is switched off: %s", component, reason)
                self._switch_off(component, reason)

    def _cut(self) -> None:
        audit = self._audit
        if audit is not None:
            self._end()
            self._leave()
            self.num_cut += 1
            _count(audit.sample.components, "cut")
            self._engine.expect_idle()

    def _end(self) -> None:
        """The audit's request is over."""
        audit = self._audit
        if audit is not None:
            self._engine.ended(audit.request)

    def _leave(self) -> None:
        audit = self._audit
        if audit is not None:
            self._audit_s += time.monotonic() - audit.begun_s
            self._audit = None


def _nearest(components: frozenset[str]) -> str:
    """Of several that gave a request KV, the one that is nearest to what was reused."""
    return next((one for one in counters.AUDITED if one in components), min(components))


def _count(components: Iterable[str], result: Result) -> None:
    for component in components:
        counters.AUDIT.add(1, component, result)
