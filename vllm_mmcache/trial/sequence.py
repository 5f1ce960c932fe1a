# SPDX-License-Identifier: Apache-2.0
"""The requests of a trial, and what each of them shows. Engine process.

Two pictures and a question are asked cold, and cold again with a step that ends elsewhere: how far these two answers
are apart is what the engine itself can repeat. Then every component is made to do its work, and the answer may be no
further from a cold one than that. An answer that goes on from a cached prefix is compared with a cold one whose steps
end at the same places, since a kernel may round otherwise when its input is cut elsewhere.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm_mmcache.base import status
from vllm_mmcache.base.errors import one_line
from vllm_mmcache.components.image_spans.spans import image_spans
from vllm_mmcache.exactness import distance
from vllm_mmcache.exactness.conversations import filler
from vllm_mmcache.models.vllm_registry import images_of
from vllm_mmcache.reference_attention.comparison import PICTURE, merged
from vllm_mmcache.trial.verdict import Verdict
from vllm_mmcache.trial.vllm_engine import NUM_TOKENS, Reply, TrialEngine, TrialFailed
from vllm_mmcache.trial.vllm_prompts import MIN_WORDS, CannotRender, Prompt, Prompts

logger = logging.getLogger("vllm.mmcache")

SwitchOff = Callable[[str, str], None]
"""Switches a component off in all ranks: its name, and the reason."""

FIRST = ("picture one", "What is the first one?" * 3, "picture two", "What is in these pictures?")
SECOND = (*FIRST[:3], "Which colours are at their edges?")
OTHER = (*FIRST[:2], "picture three", FIRST[3])

MOST_NOISE = 0.1
"""What two cold runs may differ by: a warm answer may differ by several times as much, and no wrong one may pass."""
_KERNEL_TOKENS = 64
"""GDN kernels work on so many tokens at a time: a step that ends between two of these rounds otherwise."""


class Trial:
    """Tries components on one engine. `switch_off` is called for each that does not pass, before others are tried."""

    def __init__(self, engine_core: Any, components: Sequence[str], seconds: float, switch_off: SwitchOff) -> None:
        self.verdict = Verdict()
        self._components = components
        self._switch_off = switch_off
        self._begun = time.monotonic()
        self._engine = TrialEngine(engine_core, self._begun + seconds)
        self._bound = math.inf
        self._pending: dict[str, float] = {}  # component -> allowed distance; its answer was within it
        self._cold_other: Reply | None = None  # a cold answer about another second picture
        self._warm = ("", "")  # the salt of what is cached, and the name of its pictures

    def run(self) -> Verdict:
        """Try them. Raises nothing but what ends the process."""
        engine = self._engine
        try:
            with engine.leaving_nothing():
                self._try_all()
        except (TrialFailed, CannotRender) as reason:
            self._give_up(str(reason))
        except Exception as error:  # of the model, a kernel, or vLLM: the server is to start all the same
            logger.debug("mmcache: the trial ended with an error", exc_info=True)
            self._give_up(one_line(error, 300))
        self._judge_attention()
        self.verdict.num_requests = engine.num_requests
        self.verdict.seconds = time.monotonic() - self._begun
        return self.verdict

    def _try_all(self) -> None:
        first, second, other = self._prompts()
        engine = self._engine
        with engine.without_checkpoints():
            with engine.comparing_attention(first):
                cold = engine.ask(first, engine.salt("cold"), "kept")
            again = engine.ask(first, engine.salt("cold again"), stops=[self._stop_before(first.start(0))])
        self.verdict.noise = distance.between(cold, again)
        self._try_metrics()
        self._bound = self._bound_of(self.verdict.noise)
        self._try_features(first, cold)
        self._try_hits(first, second, other)
        self._settle_pending(other, cold)
        self._try_image_spans(first, cold)
        self._settle_pending(other, cold)
        self._try_resumed_images(second)
        self._settle_pending(other, cold)

    def _prompts(self) -> tuple[Prompt, Prompt, Prompt]:
        """Two questions about two pictures, and the first about another second one. Raises: CannotRender.

        The second question is longer than a block, so a hit on all of it covers the pictures.
        """
        config = self._engine.vllm_config
        block = self._engine.block_tokens
        longest = int(config.model_config.max_model_len) - NUM_TOKENS
        before = min(max(MIN_WORDS, math.lcm(block, _KERNEL_TOKENS), block * 5 // 4), longest // 3)
        prompts = Prompts(config)
        try:
            longer = (*SECOND, filler(block * 5 // 4))
            found = [prompts.render(before, parts) for parts in (FIRST, longer, OTHER)]
        finally:
            prompts.close()
        if (most := max(len(one.token_ids) for one in found)) > longest:
            raise CannotRender(f"two pictures and a question have {most} tokens, and the model takes {longest}")
        return found[0], found[1], found[2]

    def _stop_before(self, end: int) -> int:
        """Where a step can end in the text before the pictures, so that a kernel rounds as if it had not."""
        block = self._engine.block_tokens
        unit = math.lcm(block, _KERNEL_TOKENS)
        return end // unit * unit or end // block * block or end // 2

    def _is_tried(self, component: str) -> bool:
        return component in self._components and not self.verdict.reason_of(component)

    def _try_metrics(self) -> None:
        if self._is_tried("metrics") and self._engine.core.log_stats:
            with self._trying("metrics"):
                if not self._engine.has_sent_counts:
                    raise TrialFailed("no statistics of the engine had the counts of its components")
                self._passed("metrics")

    def _try_features(self, first: Prompt, cold: Reply) -> None:
        """The pictures of the cold run once more, in another prefix: their features come from the store."""
        if not self._is_tried("features"):
            return
        engine = self._engine
        with self._trying("features"), engine.without_checkpoints():
            engine.forget_pictures()
            warm = engine.ask(first, engine.salt("features"), "kept")
            if warm.tower_images:
                raise TrialFailed(f"the vision tower ran for {warm.tower_images} of 2 pictures that the store has")
            if warm.tower_runs:
                raise TrialFailed(
                    f"the vision tower ran {warm.tower_runs} times unseen for pictures that the store has"
                )
            self._judge("features", cold, warm, "with both pictures' features from the store")

    def _try_hits(self, first: Prompt, second: Prompt, other: Prompt) -> None:
        """Another question about both pictures, and the same about another second one, on what the first has left.

        A wrong answer may be of any component that has a part in a hit. So one after the other is switched off, and
        the three are asked anew.
        """
        suspects = [
            component
            for component in ("inner_checkpoints", "image_checkpoints", "block_keys")
            if self._is_tried(component)
        ]
        if not suspects:
            return
        with self._trying(*suspects):
            for number in range(len(suspects) + 1):
                component, wrong = self._wrong_hit(first, second, other, f"{number}")
                blamed = [one for one in ([component] if component else suspects) if self._is_tried(one)]
                if not wrong or not blamed:
                    break
                self._differs(blamed[0], wrong)
            if wrong:
                raise TrialFailed(f"hits are wrong without it, too: {wrong}")

    def _wrong_hit(self, first: Prompt, second: Prompt, other: Prompt, name: str) -> tuple[str, str]:
        """Which component made an answer on a cached prefix wrong, and what is wrong; else those in use are pending.

        The component is empty where it may be of several.
        """
        engine = self._engine
        salt, pictures = self._warm = engine.salt(f"warm {name}"), f"warm {name}"
        with engine.every_checkpoint_pays():
            before = engine.ask(first, salt, pictures)
            hits = []
            for prompt in (second, other):
                with engine.comparing_attention(prompt):
                    hits.append((prompt, engine.ask(prompt, salt, pictures)))
        kept = {*before.stops, *before.cuts}
        if hits[1][1].num_cached_tokens > other.start(1):
            return "block_keys", "a question about another picture was a hit on the blocks of the first one"
        for prompt, hit in hits:
            cached = hit.num_cached_tokens
            if not cached:
                continue
            stops = [*sorted(stop for stop in kept if stop < cached), cached, *hit.stops, *hit.cuts]
            with engine.without_checkpoints():
                alike = engine.ask(prompt, engine.salt(f"cold {name} {cached}"), stops=stops)
            if prompt is other:
                self._cold_other = alike
            if (far := distance.between(alike, hit)) > self._bound:
                return (
                    "",
                    f"an answer on {cached} cached tokens is {far:.2g} from a cold one, allowed {self._bound:.2g}",
                )
        for component in ("inner_checkpoints", "image_checkpoints", "block_keys"):
            if self._is_tried(component):
                self._pend_if_used(component, before, [hit for _, hit in hits])
        return "", ""

    def _pend_if_used(self, component: str, before: Reply, hits: Sequence[Reply]) -> None:
        ends = {hit.num_cached_tokens for hit in hits}
        if component == "block_keys" and not any(ends):
            self._untried(component, "no question was a hit")
        elif component == "image_checkpoints" and not any(hit.checkpoints_used for hit in hits):
            self._untried(component, "no hit ended at a checkpoint")
        elif component == "inner_checkpoints" and not ends & set(before.cuts):
            self._untried(component, "no hit ended at a state that was kept inside a step")
        else:
            self._pending[component] = self._bound

    def _try_image_spans(self, first: Prompt, cold: Reply) -> None:
        """The first question in steps that would end inside a picture."""
        if not self._is_tried("image_spans"):
            return
        engine = self._engine
        with self._trying("image_spans"):
            request = SimpleNamespace(mm_features=first.features)
            spans = [(start, last + 1) for start, last in image_spans(request)]
            self._check_tokens(first, spans)
            longest = max(end - start for start, end in spans)
            with engine.without_checkpoints():
                if engine.vllm_config.scheduler_config.enable_chunked_prefill:
                    with engine.small_steps(longest + longest // 3):
                        reply = engine.ask(first, engine.salt("small steps"))
                else:  # vLLM computes a prompt in one step
                    reply = engine.ask(first, engine.salt("one step"))
                between = engine.ask(first, engine.salt("between spans"), stops=[end for _, end in spans])
            if not reply.stops and engine.vllm_config.scheduler_config.enable_chunked_prefill:
                raise TrialFailed("steps could not be made small enough")
            for start, end in spans:
                if inside := [stop for stop in reply.stops if start < stop < end]:
                    self._differs("image_spans", f"a step ended at {inside[0]}, inside a picture at {start} to {end}")
                    return
            noise = max(self.verdict.noise, distance.between(cold, between))
            self._judge("image_spans", cold, reply, "in small steps", noise)

    def _check_tokens(self, prompt: Prompt, spans: Sequence[tuple[int, int]]) -> None:
        """Spans are what the model's class says. Raises: TrialFailed."""
        model_config = self._engine.vllm_config.model_config
        if (images := images_of(model_config)) is None:
            return
        tokens = images.tokens(model_config.hf_config)
        for start, end in spans:
            before, after = prompt.token_ids[start - 1], prompt.token_ids[end]
            marks = tokens.begin in (None, before) and tokens.end in (None, after)
            if not marks or set(prompt.token_ids[start:end]) != {tokens.image}:
                raise TrialFailed(f"tokens {start} to {end} are no picture as the model was trained with it")

    def _judge_attention(self) -> None:
        """Attention over pictures is that of image_spans where it computes it, also if not tried; else it is vLLM's."""
        seen = merged(self._engine.attention)
        rows = ", ".join(f"{count} ({kind})" for kind, count in seen["rows"].items() if count)
        unread = f"not computed anew: attention ({seen['unread']})" if seen["unread"] else ""
        self.verdict.attention = f"attention computed anew: rows {rows}" if rows else unread
        self.verdict.attention_wrong = "; ".join(f"{kind}: {what}" for kind, what in seen["wrong"].items())
        is_on = status.is_on("image_spans") and not self.verdict.reason_of("image_spans")
        if PICTURE in seen["wrong"] and is_on and self._engine.attends_with_image_spans:
            self._differs("image_spans", f"attention over a picture is not the naive form's: {seen['wrong'][PICTURE]}")

    def _try_resumed_images(self, second: Prompt) -> None:
        """A question on a cached prefix loses its blocks and its pictures when it has answered once, and goes on."""
        if not self._is_tried("resumed_images"):
            return
        engine = self._engine
        with self._trying("resumed_images"):
            salt, pictures = self._warm
            with engine.without_checkpoints(), self._without_features():
                if not salt:
                    salt, pictures = engine.salt("resumed"), "resumed"
                    engine.ask(second, salt, pictures)
                lost: list[int] = []

                def lose(request: Any, num_tokens: int) -> None:
                    if num_tokens and not lost:
                        lost.append(num_tokens)
                        engine.forget_kv(of_running=True)
                        engine.core.reset_encoder_cache()

                warm = engine.ask(second, salt, pictures, at_step=lose)
                # What it had answered is part of its prompt when it comes back.
                answered = replace(second, token_ids=(*second.token_ids, warm.token_ids[0]))
                cold = engine.ask(answered, engine.salt("not resumed"), stops=warm.stops)
            if not lost:
                raise TrialFailed("the request ended before it could be preempted")
            if warm.num_cached_tokens < second.end(0):
                raise TrialFailed("the prefix that it began with did not cover a picture")
            warm, cold = warm.part(1, NUM_TOKENS), cold.part(0, NUM_TOKENS - 1)
            self._judge("resumed_images", cold, warm, "after it was preempted")

    def _settle_pending(self, other: Prompt, cold: Reply) -> None:
        """Pending components pass if a cold answer about another picture is further from `cold` than their bound.

        Else the answers would have shown no wrong picture, and the components count as not tried. Called after each
        group of trials, so that a later one that takes too long undoes no earlier one.
        """
        if self._pending and self._cold_other is None:
            with self._trying(*self._pending), self._engine.without_checkpoints():
                self._cold_other = self._engine.ask(other, self._engine.salt("another picture"))
        if self._cold_other is None:  # nothing is left to pass
            return
        far = distance.between(cold, self._cold_other)
        for component, bound in list(self._pending.items()):
            if far > bound:
                self._passed(component)
            else:
                self._untried(
                    component,
                    f"another picture moves the model's answer by {far:.2g}, and {bound:.2g} is allowed",
                )

    @contextmanager
    def _without_features(self) -> Iterator[None]:
        """The store would stand in for the inputs that a resumed request needs: it is not asked."""
        features = self._engine.features
        if features is not None:
            features.on_request_added = lambda request: None
        try:
            yield
        finally:
            if features is not None:
                del features.on_request_added

    def _judge(self, component: str, cold: Reply, reply: Reply, how: str, noise: float | None = None) -> None:
        """A component whose answer is as near to a cold one as cold ones are to each other, `noise`, is pending."""
        far = distance.between(cold, reply)
        bound = self._bound if noise is None else self._bound_of(noise)
        if far > bound:
            self._differs(component, f"an answer {how} is {far:.2g} from the cold one, and {bound:.2g} is allowed")
        else:
            self._pending[component] = bound

    def _bound_of(self, noise: float) -> float:
        """Raises: TrialFailed, where an answer as far away as that would show nothing."""
        if noise > MOST_NOISE:
            raise TrialFailed(f"two cold runs of this engine differ by {noise:.2g}, and {MOST_NOISE} is the most")
        return distance.bound_of(self._engine.floor, noise)

    @contextmanager
    def _trying(self, *components: str) -> Iterator[None]:
        """What can't be tried is switched off; a trial whose time is over ends."""
        try:
            yield
        except TrialFailed as reason:
            if self._engine.is_over:
                raise
            for component in components:
                if self._is_tried(component) and component not in self.verdict.passed:
                    self._untried(component, str(reason))

    def _passed(self, component: str) -> None:
        self._pending.pop(component, None)
        self.verdict.passed.append(component)

    def _differs(self, component: str, what: str) -> None:
        self._pending.pop(component, None)
        self.verdict.differed[component] = what
        if component in self.verdict.passed:
            self.verdict.passed.remove(component)
        self._switch_off(component, self.verdict.reason_of(component))

    def _untried(self, component: str, why: str) -> None:
        self._pending.pop(component, None)
        self.verdict.untried[component] = why
        self._switch_off(component, self.verdict.reason_of(component))

    def _give_up(self, why: str) -> None:
        """What was not tried until now is not."""
        for component in self._components:
            if self._is_tried(component) and component not in self.verdict.passed:
                self._untried(component, why)
