# SPDX-License-Identifier: Apache-2.0
"""Items on the zoo's models: which there are, and what each one's process is given. Imports no vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmcache_tools.zoo import FAMILIES, FIRST_FAMILIES, architecture_of
from vllm_mmcache.lifecycle.registry import with_needed
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS
from vllm_mmcache.prove.items import RESULT, Item, RunOptions, switches, users_environment

# The families on which a component does something; together with the others it is on for every family.
WHERE: dict[str, tuple[str, ...]] = {
    "block_keys": FIRST_FAMILIES,
    "image_spans": ("gemma3",),
    "resumed_images": ("qwen3-vl", "gemma3"),
    "image_checkpoints": ("qwen3.5", "gemma3"),
    "inner_checkpoints": ("qwen3.5",),
    "metrics": ("qwen3-vl",),
    "features": FIRST_FAMILIES,
}
SWITCH = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class ZooHow(RunOptions):
    """How items on the zoo's models are run."""

    precision: str | None = None
    """A dtype of torch; None is the family's own."""
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Further variables by model runner, for a platform that needs them."""

    worker: ClassVar[str] = "mmcache_tools.prove_zoo.worker"
    fixed_arguments: ClassVar[tuple[str, ...]] = (
        "tokenizer", "tokenizer_mode", "tokenizer_revision", "revision", "code_revision", "hf_config_path", "hf_token",
        "hf_overrides", "load_format", "download_dir", "quantization", "config_format", "skip_tokenizer_init",
        "max_model_len", "limit_mm_per_prompt", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "mm_processor_kwargs", "generation_config",
        "override_generation_config", "trust_remote_code", "speculative_config",
    )  # fmt: skip

    def task(self, item: Item, stock: RESULT | None) -> dict[str, Any]:
        """The arguments of checks.check."""
        shared = {"components": item.components, "short": self.short, "arguments": self.arguments}
        engine = {"runner": item.runner, "precision": self.precision, "compiled": item.compiled}
        return {"family": item.subject, **engine, **shared}

    def environment(self, item: Item) -> dict[str, str]:
        """The variables of an item's process, without a network.

        With a model runner, that one, no other plugin and no other setting of the user's; without, what the user has.
        """
        if item.runner is None:
            return super().environment(item) | {"HF_HUB_OFFLINE": "1"}
        environ = users_environment("MMCACHE_", "BENCH_", "TEST_") | {"VLLM_LOGGING_LEVEL": "WARNING"}
        environ |= {"VLLM_PLUGINS": "mmcache", "HF_HUB_OFFLINE": "1", SWITCH: str(int(item.runner == "V2"))}
        environ |= self.environments.get(item.runner, {})
        return environ | switches(item)


def plan(families: Sequence[str], runners: Sequence[str], compiled: bool, short: bool) -> list[Item]:
    """The items in the order in which they run: stock first, which the others are compared with; all last."""
    items = []
    for runner in runners:
        if short:
            items += [Item(family, ENGINE_COMPONENTS, runner) for family in families]
            continue
        for components in ((), ENGINE_COMPONENTS):
            for is_compiled in (False, True) if compiled else (False,):
                items += [Item(family, components, runner, is_compiled) for family in families]
        items += [
            Item(family, with_needed(component), runner)
            for component in ENGINE_COMPONENTS
            for family in families
            if family in WHERE[component]
        ]
    return items


def families_of(architecture: str) -> list[str]:
    """The zoo's families of an architecture."""
    return [family for family in FAMILIES if architecture_of(family) == architecture]
