# SPDX-License-Identifier: Apache-2.0
"""vLLM engines on the zoo's tiny models, for checks, tests and benchmarks: at most one alive, each with its oracle.

An engine takes 15 to 40 s to start on two cores, so who checks asks the pool for a configuration, and the pool closes
the engine of another one first. Everything runs in this process: the checks look at the scheduler and the KV cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Before vLLM: it sets variables that vLLM reads when it is imported.
from vllm_mmcache.prove.rig import Rig  # isort: skip

import torch
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from mmcache_tools.harness.oracle import BF16_ORACLE_TOLERANCE, Oracle, assert_equals_oracle
from mmcache_tools.harness.tolerances import BF16_SELF_TOLERANCE, TOLERANCE, assert_equals_answer
from mmcache_tools.zoo import BY_NAME, build_cached
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer, Message

WHOLE_STEPS = 2048  # tokens of a step that holds a whole prompt


@dataclass(frozen=True)
class EngineConfig:
    """What distinguishes two engines. Units: tokens, blocks and sequences, as named; None is vLLM's own default."""

    family: str
    block_tokens: int | None = 32
    batched_tokens: int | None = WHOLE_STEPS
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
        exact = current_platform.is_cpu() and BY_NAME[self.family].dtype == "float32"
        return torch.float32 if exact else torch.bfloat16


# For the requests of vllm_mmcache/prove/load.py: a small budget and a tiny KV cache.
LOAD = EngineConfig("gemma3", batched_tokens=96, num_blocks=64, num_seqs=8, max_tokens=512)


class ZooRig(Rig):
    """An engine on a model of the zoo. What its answers must equal is the oracle's, for the cold prompt."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.has_small_steps = config.batched_tokens not in (None, WHOLE_STEPS)
        self.oracle = Oracle(directory)
        self.family = BY_NAME[config.family]
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
    def keeps_all_kv(self) -> bool:
        """Full attention in every layer: each complete block stays a hit. Others keep states at few places."""
        return bool(self.family.keeps_all_kv)

    def render(self, messages: Sequence[Message]) -> tuple[str, tuple[Image.Image, ...]]:
        """Prompt text and images of a conversation, without the token that the tokenizer adds."""
        prompt = self.oracle.processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
        images = tuple(part["image"] for part in parts if part["type"] == "image")
        return str(prompt).removeprefix(self.added_bos), images

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

    def enqueue(self, conversation: Sequence[Message], max_tokens: int) -> None:
        """Add a conversation to the engine's queue; its steps are the caller's."""
        prompt, images = self.render(conversation)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.llm.enqueue([{"prompt": prompt, "multi_modal_data": {"image": list(images)}}], params, use_tqdm=False)

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

    def num_preemptions(self) -> int:
        """Requests preempted since the engine started."""
        found = [m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
        assert found, "this vLLM has no counter vllm:num_preemptions"
        return int(sum(found))

    def kv_tensors(self) -> list[torch.Tensor]:
        """The KV cache itself, one tensor per layer, shared with the worker; its shape is the attention backend's."""
        return [layer for layer in self.runner.kv_caches if isinstance(layer, torch.Tensor)]

    @property
    def tolerance(self) -> float:
        """How far log-probabilities of two runs of this engine may be apart, whatever its caches hold."""
        return TOLERANCE if self.dtype is torch.float32 and not self.has_other_kv else BF16_SELF_TOLERANCE

    def assert_as_cold(self, answer: Answer, runs: Sequence[Answer]) -> float:
        """The largest delta to the first cold run; the zoo's tolerance of log-probabilities holds, too."""
        super().assert_as_cold(answer, runs)
        return assert_equals_answer(answer, runs[0], self.tolerance, "the own cold run")

    def assert_exact(self, answers: Sequence[Answer], oracle: Oracle | None = None) -> float:
        """Every answer is that of a cold run, by the rule of the engine's dtype. Returns how far they are.

        float32: Transformers decides. bfloat16: vLLM's own cold run does, and Transformers gives a coarse second bound.
        Where the KV cache holds less than was calculated, the own cold run is all there is.
        """
        oracle = oracle or self.oracle
        if self.tolerance == TOLERANCE:
            return max(assert_equals_oracle(answer, oracle) for answer in answers)
        worst = self.assert_equals_own_cold_run(answers)
        if self.has_other_kv:
            return worst
        far = max(assert_equals_oracle(answer, oracle, BF16_ORACLE_TOLERANCE) for answer in answers)
        print(f"bfloat16: {worst:.2f} from the own cold run, {far:.2f} from Transformers in float32")
        return worst


class EnginePool:
    """Holds the one engine that is alive."""

    def __init__(self, zoo_root: Path, check: Callable[[ZooRig], None] | None = None) -> None:
        """`check` is asked about each engine that is started; it raises what is to stop its user."""
        self.zoo_root = zoo_root
        self.check = check
        self.rig: ZooRig | None = None

    def get(self, config: EngineConfig) -> ZooRig:
        """The engine of this configuration, cold."""
        if self.rig is None or self.rig.config != config:
            self.close()
            self.rig = ZooRig(config, build_cached(config.family, self.zoo_root))
            if self.check is not None:
                self.check(self.rig)
        self.rig.make_cold()
        return self.rig

    def close(self) -> None:
        """Close the engine, if one is alive."""
        if self.rig is not None:
            self.rig.close()
            self.rig = None
