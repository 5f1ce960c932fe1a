# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine for the checks of exactness, and the questions that are put to it.

It runs in this process: the checks look at the scheduler and the KV cache. Which model it has, how a conversation
becomes its prompt, and what its answers must equal is for the classes that derive from Rig.
"""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from PIL import Image
from vllm import LLM

from vllm_mmcache.exactness import distance
from vllm_mmcache.exactness.answers import Answer, Message, assert_near


@contextmanager
def replaced(thing: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, this one object has another method of this name; after it, the one that it had."""
    own = vars(thing).get(name)
    setattr(thing, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(thing, name)
        else:
            setattr(thing, name, own)


class Rig(ABC):
    """One engine. `ask` puts conversations; `assert_exact` judges the answers."""

    llm: LLM
    has_small_steps: bool
    """Whether a step does not hold a whole prompt."""
    noise: float = 0.0
    """How far two cold runs of one prompt were apart until now, at most: a share of the probability (distance.py)."""

    @property
    @abstractmethod
    def keeps_all_kv(self) -> bool:
        """Full attention in every layer: each complete block stays a hit. Others keep states at few places."""

    @abstractmethod
    def render(self, messages: Sequence[Message]) -> tuple[str, tuple[Image.Image, ...]]:
        """Prompt text and images of a conversation."""

    @abstractmethod
    def ask_rendered(
        self, rendered: Sequence[tuple[str, tuple[Image.Image, ...]]], lengths: Sequence[int]
    ) -> list[Answer]:
        """As `ask`, for prompts that are rendered already; `lengths`: tokens of each answer."""

    @abstractmethod
    def enqueue(self, conversation: Sequence[Message], max_tokens: int) -> None:
        """Add a conversation to the engine's queue; its steps are the caller's."""

    @abstractmethod
    def image_spans(self, answer: Answer) -> list[tuple[int, int]]:
        """Start and end (exclusive) of each image's placeholder tokens in the prompt, with what stands inside."""

    @property
    def vllm_config(self) -> Any:
        """The engine's VllmConfig."""
        return self.llm.llm_engine.vllm_config

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler, which is in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def dtype(self) -> torch.dtype:
        """What the engine calculates in."""
        found: torch.dtype = self.vllm_config.model_config.dtype
        return found

    @property
    def has_other_kv(self) -> bool:
        """Whether the KV cache holds less than what was calculated, as fp8 does; no oracle knows how much less."""
        kept = str(self.vllm_config.cache_config.cache_dtype)
        return kept not in ("auto", str(self.dtype).removeprefix("torch."))

    @property
    def bound(self) -> float:
        """How far two right answers of this engine may be apart: what its cold runs show, with a floor."""
        floor = distance.floor_of(str(self.dtype).removeprefix("torch."), self.has_other_kv)
        return distance.bound_of(floor, self.noise)

    @property
    def images_attend_both_ways(self) -> bool:
        """Whether an image's tokens see those behind them, in the same image."""
        return bool(self.vllm_config.model_config.is_mm_prefix_lm)

    @property
    def block_tokens(self) -> int:
        """The block size that vLLM really uses; hybrid models widen it (160 for the zoo's qwen3.5)."""
        return int(self.vllm_config.cache_config.block_size)

    def ask(self, *conversations: Sequence[Message], max_tokens: int | Sequence[int] = 8) -> list[Answer]:
        """Answers to all conversations, submitted together; greedy, never ended early."""
        lengths = [max_tokens] * len(conversations) if isinstance(max_tokens, int) else list(max_tokens)
        rendered = [self.render(messages) for messages in conversations]
        return self.ask_rendered(rendered, lengths)

    def ask_again(self, answer: Answer) -> Answer:
        """The same prompt once more, for as many tokens."""
        return self.ask_rendered([(answer.prompt, answer.images)], [len(answer.token_ids)])[0]

    def cold_runs(self, answer: Answer) -> list[Answer]:
        """Two cold answers to the same prompt, one in steps that end elsewhere; `noise` learns how far they are apart.

        Empties the caches.
        """
        spans = self.image_spans(answer) if answer.images else []
        before = spans[0][0] if spans else len(answer.prompt_ids)
        runs = []
        for first_step in (None, max(1, before // 2)):  # an image is computed as a whole
            self.make_cold()
            with self.first_step_of(first_step):
                runs.append(self.ask_again(answer))
            assert runs[-1].num_cached_tokens == 0, "the caches were emptied, and it was a hit"
        self.noise = max(self.noise, distance.between(*runs))
        return runs

    @contextmanager
    def first_step_of(self, num_tokens: int | None) -> Iterator[None]:
        """The first step computes at most so many tokens; None is as many as there are."""
        scheduler = self.scheduler
        schedule, most = scheduler.schedule, scheduler.max_num_scheduled_tokens
        left = [] if num_tokens is None else [num_tokens]

        def schedule_first(*args: Any, **kwargs: Any) -> Any:
            scheduler.max_num_scheduled_tokens = min([most, *left])
            try:
                step = schedule(*args, **kwargs)
            finally:
                scheduler.max_num_scheduled_tokens = most
            left.clear()
            return step

        with replaced(scheduler, "schedule", schedule_first):
            yield

    def assert_exact(self, answers: Sequence[Answer]) -> float:
        """Every answer is that of a cold run, or Inexact is raised. Returns how far they are. May empty the caches."""
        return self.assert_equals_own_cold_run(answers)

    def assert_equals_own_cold_run(self, answers: Sequence[Answer]) -> float:
        """How far they are from cold runs of the same prompts on this engine, at most. Empties the caches."""
        worst = 0.0
        for answer in answers:
            worst = max(worst, self.assert_as_cold(answer, self.cold_runs(answer)))
        return worst

    def assert_as_cold(self, answer: Answer, runs: Sequence[Answer]) -> float:
        """How far an answer is from its cold runs; Inexact where that is further than they are from each other."""
        return assert_near(answer, runs, self.bound, "its own cold runs")

    def make_cold(self) -> None:
        """Forget all KV blocks, encoder outputs and processed images, and the features in RAM."""
        self.forget_all_but_features()
        self.forget_features()

    def forget_features(self) -> None:
        """Forget the features in RAM, also those that are on their way there."""
        if (features := self.features) is not None:
            assert features.copying.wait(60)
            features.store.ram.clear()

    def in_workers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function says of each of the engine's workers, wherever they run. It is sent by its name."""
        return list(self.llm.collective_rpc(function, args=arguments))

    def forget_all_but_features(self) -> None:
        """As after many other requests, and in the KV cache as after a restart."""
        assert self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        if (features := self.features) is not None:
            assert features.copying.wait(60)
            assert features.wait_until_known(600)

    @property
    def runner(self) -> Any:
        """The model runner of vLLM, where it is in this process; else None."""
        driver = getattr(self.llm.llm_engine.model_executor, "driver_worker", None)
        return driver.worker.model_runner if driver is not None else None

    @property
    def features(self) -> Any:
        """The feature store beside the engine's scheduler; None on stock, and where features are not kept."""
        from vllm_mmcache.components.features.engine.hooks import connector_of

        found = connector_of(self.scheduler)
        return found if found is not None and not found.is_closed else None

    def close(self) -> None:
        """Shut the engine down and give its memory back."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()  # collects, too
        gc.freeze()  # what is left stays: a start collects a dozen times, and need not look at it
