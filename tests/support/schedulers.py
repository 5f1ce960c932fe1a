# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler and KV cache manager without a model: requests that are real, answers that are made up.

A step is what an engine does but for the model: `schedule`, then `update_from_output` with a token for each request
that has one coming; with async scheduling the next step is scheduled before.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.vllm_requests import original
from vllm_mmcache.hooking import installer, subclasses
from vllm_mmcache.lifecycle.registry import COMPONENTS

Sparse = Literal["", "window", "mamba"]
BLOCK = 16  # tokens
MOST_STEPS = 10_000


def groups(sparse: Sparse, num_groups: int, block_tokens: int = BLOCK) -> list[KVCacheSpec]:
    """The KV groups of a model: full attention, and behind it groups that keep states sparsely."""
    full = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32)
    few: dict[str, Any] = {
        "window": SlidingWindowSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=4 * block_tokens
        ),
        "mamba": MambaSpec(
            block_size=block_tokens, shapes=((8, block_tokens),), dtypes=(torch.float32,), mamba_cache_mode="align"
        ),
    }
    return [full, *itertools.repeat(few[sparse], num_groups - 1)] if sparse else [full] * num_groups


def engine_config(model: Path, *, is_async: bool = False, **arguments: Any) -> VllmConfig:
    """The configuration of an engine on the CPU for one of the zoo's models."""
    chosen: dict[str, Any] = {
        "enable_prefix_caching": True,
        "block_size": BLOCK,
        "max_model_len": 4096,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "limit_mm_per_prompt": {"image": 16},
    }
    config = EngineArgs(str(model), **chosen | arguments).create_engine_config()
    config.scheduler_config.async_scheduling = is_async  # vLLM's platform of the CPU has said no
    return config


def make_scheduler(config: VllmConfig, specs: Sequence[KVCacheSpec], num_blocks: int, *, with_plugin: bool) -> Any:
    """vLLM's scheduler for these groups of layers, or our subclass of it, as the configuration has them made.

    Of sparse groups vLLM keeps the prompt's end alone.
    """
    base = config.scheduler_config.get_scheduler_cls()
    config.cache_config.num_gpu_blocks = num_blocks
    kind = subclasses.derived(subclasses.SchedulerMixin, base) if with_plugin else base
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)],
        prefix_cache_retention_interval=0,
    )
    return kind(config, kv_cache, StructuredOutputManager(config), block_size=specs[0].block_size, log_stats=True)


def take_back() -> None:
    """Undo what the engine's role has installed: vLLM's scheduler is as it is by itself. Other roles keep theirs."""
    for group in reversed([group for group in installer._installed if group.endswith(" (engine)")]):
        installer.undo(group)
    for component in COMPONENTS.values():
        if (extension := component.extension_in("engine")) is not None:
            extension.undo()


@dataclass
class Steps:
    """An engine but for its model."""

    scheduler: Any
    is_async: bool = False
    hasher: Callable[[Request], list[bytes]] = field(init=False)
    seconds: float = 0.0
    """Of the processor, that the scheduler has taken."""
    _scheduled: deque[Any] = field(default_factory=deque)  # with the answers that it will be given
    _numbers: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        kv_cache_utils.init_none_hash(sha256)
        self.hasher = original(kv_cache_utils.get_request_block_hasher)(self.scheduler.block_size, sha256)

    def add(
        self,
        tokens: Sequence[int],
        images: Sequence[tuple[str, int, int]] = (),
        max_tokens: int = 1,
        salt: str | None = None,
    ) -> Request:
        """Add a request. images are (content id, offset, length) in prompt order."""
        request = Request(
            request_id=f"request {next(self._numbers)}",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset, length)
                )
                for name, offset, length in images
            ],
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """One step; its SchedulerOutput."""
        start = time.thread_time()
        output = self.scheduler.schedule()
        self.seconds += time.thread_time() - start
        self._scheduled.append((output, self._answer(output)))
        if len(self._scheduled) > self.is_async:
            output_before, answer = self._scheduled.popleft()
            start = time.thread_time()
            self.scheduler.update_from_output(output_before, answer)
            self.seconds += time.thread_time() - start
        return output

    def finish(self) -> list[Any]:
        """Step until no request is left; the SchedulerOutputs of the steps that computed something.

        Raises: AssertionError where some request does not come to its end.
        """
        outputs: list[Any] = []
        steps = itertools.count()
        while self.scheduler.has_unfinished_requests() or self._scheduled:
            assert next(steps) < MOST_STEPS, "a request hangs"
            if (output := self.step()).total_num_scheduled_tokens:
                outputs.append(output)
        return outputs

    def _answer(self, output: Any) -> ModelRunnerOutput:
        """A made-up token for each request all of whose tokens are computed."""
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        tokens = [
            [7] if starts[name] + num_tokens >= self.scheduler.requests[name].num_tokens else []
            for name, num_tokens in output.num_scheduled_tokens.items()
        ]
        return ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={name: number for number, name in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=tokens,
        )
