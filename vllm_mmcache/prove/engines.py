# SPDX-License-Identifier: Apache-2.0
"""vLLM engines for the checks of exactness: at most one alive, and the questions that are put to it.

An engine takes 15 to 40 s to start on two cores, so who checks asks the pool for a configuration, and the pool closes
the engine of another one first. Everything runs in this process: the checks look at the scheduler and the KV cache.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from vllm_mmcache.base import distributions
from vllm_mmcache.prove.oracle import Oracle

NUM_LOGPROBS = 10  # of each step that are compared; the vocabulary has about 1000

Message = dict[str, Any]  # content: str, or parts {"type": "text"|"image", "text"|"image": ...}


def zoo() -> Any:
    """The zoo; a model of the user's own does without. Raises: EnvironmentProblem where it is not installed."""
    return distributions.load(distributions.ZOO, "an engine on a model of the zoo")


@dataclass(frozen=True)
class EngineConfig:
    """What distinguishes two engines. Units: tokens, blocks and sequences, as named; None is vLLM's own default."""

    family: str
    block_tokens: int | None = 32
    batched_tokens: int | None = 2048
    num_blocks: int | None = None
    num_seqs: int = 4  # fewer than the requests of the batch scenarios, so that some wait
    max_tokens: int = 2048
    num_images: int = 8  # allowed per prompt; 0 is a text-only deployment
    more: tuple[tuple[str, Any], ...] = ()  # further arguments of LLM(), or other ones
    precision: str | None = None  # a dtype of torch

    @property
    def dtype(self) -> torch.dtype:
        """float32 on the CPU, but for GDN, whose kernel wants bfloat16 there; elsewhere what servers run in."""
        if self.precision is not None:
            return getattr(torch, self.precision)
        exact = current_platform.is_cpu() and zoo().BY_NAME[self.family].dtype == "float32"
        return torch.float32 if exact else torch.bfloat16


@dataclass(frozen=True)
class Answer:
    """One question and what the engine said: greedy tokens, and per step the log-probabilities of the best ones."""

    prompt: str
    images: tuple[Image.Image, ...]
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]  # per step: token id -> log-probability, NUM_LOGPROBS of them or more
    num_cached_tokens: int
    text: str

    @classmethod
    def of(cls, prompt: str, images: tuple[Image.Image, ...], output: Any) -> Answer:
        """What vLLM's RequestOutput says."""
        return cls(
            prompt=prompt,
            images=images,
            prompt_ids=tuple(output.prompt_token_ids),
            token_ids=tuple(output.outputs[0].token_ids),
            logprobs=tuple({i: e.logprob for i, e in step.items()} for step in output.outputs[0].logprobs),
            num_cached_tokens=output.num_cached_tokens,
            text=output.outputs[0].text,
        )


class Rig:
    """One engine with its oracle. `ask` puts conversations; the `expect` module judges the answers."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.oracle: Any = Oracle(directory)  # None where a rig has nothing but its own cold runs
        self.family = zoo().BY_NAME[config.family]
        limits = {"image": config.num_images} | ({"video": 0} if self.family.takes_video else {})
        arguments: dict[str, Any] = {
            "dtype": config.dtype,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": config.block_tokens,
            "max_model_len": config.max_tokens,
            "max_num_batched_tokens": config.batched_tokens,
            "max_num_seqs": config.num_seqs,
            "num_gpu_blocks_override": config.num_blocks,
            "limit_mm_per_prompt": limits,
            "max_logprobs": NUM_LOGPROBS,
            "disable_log_stats": False,  # the preemption counter
            "seed": 0,
        }
        self.llm = LLM(str(directory), **arguments | dict(self.family.engine_arguments) | dict(config.more))
        tokenizer = self.oracle.processor.tokenizer
        self.image_token_id = int(tokenizer.convert_tokens_to_ids(self.family.image_token))
        inside = [tokenizer.encode(text, add_special_tokens=False) for text in self.family.image_inside]
        assert all(len(ids) == 1 for ids in inside), "what stands inside an image must be one token each"
        self.inside_image = {ids[0] for ids in inside}

    @property
    def added_bos(self) -> str:
        """What the tokenizer puts before every text, which a rendered prompt must not have as well."""
        return self.family.bos or "" if self.family.adds_bos else ""

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
    def keeps_all_kv(self) -> bool:
        """Full attention in every layer: each complete block stays a hit. Others keep states at few places."""
        return bool(self.family.keeps_all_kv)

    @property
    def images_attend_both_ways(self) -> bool:
        """Whether an image's tokens see those behind them, in the same image."""
        return bool(self.vllm_config.model_config.is_mm_prefix_lm)

    @property
    def block_tokens(self) -> int:
        """The block size that vLLM really uses; hybrid models widen it (160 for the zoo's qwen3.5)."""
        return int(self.vllm_config.cache_config.block_size)

    def render(self, messages: Sequence[Message]) -> tuple[str, tuple[Image.Image, ...]]:
        """Prompt text and images of a conversation, without the token that the tokenizer adds."""
        prompt = self.oracle.processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
        images = tuple(part["image"] for part in parts if part["type"] == "image")
        return str(prompt).removeprefix(self.added_bos), images

    def ask(self, *conversations: Sequence[Message], max_tokens: int | Sequence[int] = 8) -> list[Answer]:
        """Answers to all conversations, submitted together; greedy, never ended early."""
        lengths = [max_tokens] * len(conversations) if isinstance(max_tokens, int) else list(max_tokens)
        rendered = [self.render(messages) for messages in conversations]
        return self.ask_rendered(rendered, lengths)

    def ask_rendered(
        self,
        rendered: Sequence[tuple[str, tuple[Image.Image, ...]]],
        lengths: Sequence[int],
        salts: Sequence[str | None] | None = None,
        uuids: Sequence[Sequence[str]] | None = None,
    ) -> list[Answer]:
        """As `ask`, for prompts that are rendered already; with cache_salts, and the client's names of the images."""
        prompts: list[Any] = [
            {"prompt": prompt, "multi_modal_data": {"image": list(images)}} if images else {"prompt": prompt}
            for prompt, images in rendered
        ]
        for prompt, salt in zip(prompts, salts or (), strict=bool(salts)):
            if salt is not None:
                prompt["cache_salt"] = salt
        for prompt, names in zip(prompts, uuids or (), strict=bool(uuids)):
            prompt["multi_modal_uuids"] = {"image": list(names)}
        params = [SamplingParams(max_tokens=n, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True) for n in lengths]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [Answer.of(prompt, images, output) for (prompt, images), output in zip(rendered, outputs, strict=True)]

    def ask_again(self, answer: Answer) -> Answer:
        """The same prompt once more, for as many tokens."""
        return self.ask_rendered([(answer.prompt, answer.images)], [len(answer.token_ids)])[0]

    def enqueue(self, conversation: Sequence[Message], max_tokens: int) -> None:
        """Add a conversation to the engine's queue; its steps are the caller's."""
        prompt, images = self.render(conversation)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.llm.enqueue([{"prompt": prompt, "multi_modal_data": {"image": list(images)}}], params, use_tqdm=False)

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
        """What a function of the module `workers` says of each of the engine's workers, wherever they run."""
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

        return connector_of(self.scheduler)

    def num_preemptions(self) -> int:
        """Requests preempted since the engine started."""
        found = [m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
        assert found, "this vLLM has no counter vllm:num_preemptions"
        return int(sum(found))

    def kv_tensors(self) -> list[torch.Tensor]:
        """The KV cache itself, one tensor per layer, shared with the worker; its shape is the attention backend's."""
        return [layer for layer in self.runner.kv_caches if isinstance(layer, torch.Tensor)]

    def image_spans(self, answer: Answer) -> list[tuple[int, int]]:
        """Start and end (exclusive) of each image's placeholder tokens in the prompt, with what stands inside."""
        spans: list[tuple[int, int]] = []
        for position, token in enumerate(answer.prompt_ids):
            if token != self.image_token_id:
                continue
            if spans and self.inside_image.issuperset(answer.prompt_ids[spans[-1][1] : position]):
                spans[-1] = (spans[-1][0], position + 1)
            else:
                spans.append((position, position + 1))
        return spans

    def close(self) -> None:
        """Shut the engine down and give its memory back."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()  # collects, too
        gc.freeze()  # what is left stays: a start collects a dozen times, and need not look at it


class EnginePool:
    """Holds the one engine that is alive."""

    def __init__(self, zoo_root: Path, check: Callable[[Rig], None] | None = None) -> None:
        """`check` is asked about each engine that is started; it raises what is to stop its user."""
        self.zoo_root = zoo_root
        self.check = check
        self.rig: Rig | None = None

    def get(self, config: EngineConfig) -> Rig:
        """The engine of this configuration, cold."""
        if self.rig is None or self.rig.config != config:
            self.close()
            self.rig = Rig(config, zoo().build_cached(config.family, self.zoo_root))
            if self.check is not None:
                self.check(self.rig)
        self.rig.make_cold()
        return self.rig

    def close(self) -> None:
        """Close the engine, if one is alive."""
        if self.rig is not None:
            self.rig.close()
            self.rig = None
