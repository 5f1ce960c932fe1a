# SPDX-License-Identifier: Apache-2.0
"""The features of vLLM that the components are tried with: how each is switched on, and what the engine must say then.

A feature is run by worker.py in an engine of its own, or shown by tests of a whole deployment, which it names. One
that does not run on the CPU has the error that vLLM ends with, so that the day it runs is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

IN_THE_ENGINE = ("block_keys", "image_checkpoints", "features", "image_spans")
"""Components that a question to an engine uses. The others work where a request comes in."""

COMPONENT_NAMES = (*IN_THE_ENGINE, "lazy_media", "lazy_processing", "identity")
"""The columns of the page. `image_extraction` is of servers; `metrics` and `observe` reuse nothing."""

NO_DRAFT_MODEL = "off: not shown to be right with speculative decoding by draft_model"
SCRATCH = "{scratch}"  # in an argument: a folder of the run


@dataclass(frozen=True)
class Fails:
    """Where vLLM stops without and with the plugin: at `start` or in `answers`, with which words of an error."""

    stage: str
    words: str


@dataclass(frozen=True)
class Feature:
    """One row. Components that `says` leaves out are on in the row's family, or have nothing to do there."""

    name: str
    title: str
    family: str = "gemma3"  # it has every component's work: a sliding window, and images that attend both ways
    engine: dict[str, Any] = field(default_factory=dict)  # arguments of LLM()
    way: str = "plain"  # how questions are put: a function of ways.py
    tokens_before: int = 180  # of text before a question's picture
    tokens_behind: int = 40  # of text behind it
    says: dict[str, str] = field(default_factory=dict)  # component -> its state and reason, where it is not on
    says_on_v2: dict[str, str] = field(default_factory=dict)  # where that is otherwise on model runner V2
    fails: dict[str, Fails] = field(default_factory=dict)  # by engine configuration of the tests
    uses: tuple[str, ...] = IN_THE_ENGINE  # components whose work the questions are
    shown_by: str = ""  # tests of a deployment instead of an engine
    tested_on: str = ""  # the engine configuration of those tests, where it is another one
    in_ci: bool = False
    note: str = ""

    def expected(self, engine: str) -> dict[str, str]:
        """What the report says of components that are not on, by the name of an engine configuration of the tests."""
        return self.says if engine == "v1" else self.says | self.says_on_v2


def connector(name: str) -> dict[str, Any]:
    """A connector of vLLM's examples, which keeps files."""
    return {"connector": name, "role": "both", "connector_extra_config": {"shared_storage_path": f"{SCRATCH}/{name}"}}


def prefixed(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """The same under the names that vLLM has for the two kinds of connectors: `kv_` and `ec_`."""
    named = {f"{kind}_{name}": value for name, value in config.items()}
    return named | {f"{kind}_role": f"{kind}_both"}


EVERYWHERE = ("v1", "v2", "v2-async")


def always(stage: str, words: str) -> dict[str, Fails]:
    return dict.fromkeys(EVERYWHERE, Fails(stage, words))


def deployment(name: str, title: str, tested_on: str = "") -> Feature:
    """A case of tests/system/deployments/test_composes.py."""
    shown_by = f"tests/system/deployments/test_composes.py::test_flags[{name}]"
    return Feature(
        name, title, family="qwen3-vl", shown_by=shown_by, says=QWEN, uses=COMPONENT_NAMES, tested_on=tested_on
    )


QWEN = {
    "image_spans": "unneeded: an image of this model sees what came before it, as text does",
    "image_checkpoints": "unneeded: this model keeps every block's KV",
}
NOT_INTERPRETED = dict.fromkeys(("v2", "v2-async"), Fails("answers", "mask has unsupported dtype"))
"""Kernels of V2 that Triton's interpreter does not take."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

FEATURES = (
    Feature("none", "no other feature, for comparison"),
    Feature(
        "ngram", "speculative decoding with ngram", engine={"speculative_config": NGRAM}, way="letters",
        fails=NOT_INTERPRETED,
    ),
    Feature(
        "eagle", "speculative decoding with EAGLE", engine={"speculative_config": {"drafter": "eagle"}}, way="letters",
    ),
    Feature(
        "mtp", "speculative decoding with MTP", family="qwen3.5", engine={"speculative_config": {"drafter": "mtp"}},
        way="letters", fails={"v1": Fails("answers", "'function' object is not subscriptable")},
        tokens_before=300, tokens_behind=500,  # a hybrid has long blocks, and with a draft head vLLM drops one of a hit
    ),
    Feature(
        "draft_model", "speculative decoding with a draft model", family="qwen3-vl",
        note="On Gemma 3, stock vLLM answers wrongly with a draft model on V1, also about text. On V2 it is exact.",
        engine={"speculative_config": {"drafter": "draft_model"}}, way="letters",
        says={"image_checkpoints": NO_DRAFT_MODEL},
        says_on_v2=QWEN,
    ),
    Feature(
        "kv_connector", "the KV connector ExampleConnector", family="qwen3-vl",
        engine={"kv_transfer_config": prefixed("kv", connector("ExampleConnector"))},
    ),
    Feature(
        "ec_connector", "the encoder-cache connector ECExampleConnector",
        engine={"ec_transfer_config": prefixed("ec", connector("ECExampleConnector"))},
        says={"features": "off: ec_transfer_config is set, and wins"},
    ),
    Feature(
        "lora", "LoRA on the language model", engine={"enable_lora": True, "max_lora_rank": 8}, way="lora", in_ci=True
    ),
    Feature(
        "tower_lora", "LoRA on the vision tower", family="qwen3-vl", way="lora",
        engine={"enable_lora": True, "max_lora_rank": 8, "enable_tower_connector_lora": True},
        says={"features": "off: LoRA adapters can change the vision tower"},
    ),
    Feature("structured", "structured output with xgrammar", way="structured", fails=NOT_INTERPRETED),
    Feature(
        "n", "several answers to a request (n > 1), drawn with a seed", way="several",
        note="On CUDA with V1, by reading, a seed draws other tokens where a prompt is computed in several steps.",
    ),
    Feature("beam", "beam search", way="beam"),
    Feature(
        "prompt_embeds", "prompt embeddings", engine={"enable_prompt_embeds": True}, way="embeddings",
        note="Whole prompts were run. In chat messages, by reading, V1 lets embeddings attend both ways as images do.",
    ),
    Feature(
        "pooling", "pooling models", family="qwen3-vl", engine={"runner": "pooling", "convert": "embed"}, way="pooled",
        note="V2 schedules these models synchronously.",
    ),
    Feature("priority", "priority scheduling", engine={"scheduling_policy": "priority"}, way="with_priority"),
    Feature(
        "sleep", "sleep mode", engine={"enable_sleep_mode": True}, fails=always("start", "Sleep mode is not supported")
    ),
    Feature(
        "reload", "loading weights again", way="reloaded",
        note="Call `reset_encoder_cache` afterwards, or vLLM ends with `Encoder cache miss`.",
    ),
    Feature(
        "transfer", "transferring weights in place", engine={"weight_transfer_config": {"backend": "factors"}},
        way="transferred", note="The transfer is by a backend that the tests bring.",
    ),
    Feature("fp8_kv", "a KV cache in fp8", family="qwen3-vl", engine={"kv_cache_dtype": "fp8"}),
    Feature(
        "async", "`--async-scheduling`", family="gemma3, qwen3-vl, qwen3.5",
        shown_by="tests/engine/image_spans/test_async.py",
        uses=("block_keys", "image_checkpoints", "image_spans"), tested_on="v2-async",
    ),
    deployment("shm", "`--mm-processor-cache-type shm`"),
    deployment("tp2", "tensor parallel 2"),
    deployment("encoder-data-shm", "`--mm-encoder-tp-mode data`, two ranks, with `shm`"),
    deployment("dp2", "data parallel 2, one port"),
    deployment("api2", "two API servers"),
    deployment("pp2", "pipeline parallel 2", "v2-async"),
    deployment("dp2-api2", "data parallel 2, two API servers"),
    deployment("all", "two ranks, `--mm-encoder-tp-mode data`, `shm`, data parallel 2 and two API servers together"),
)  # fmt: skip

BY_NAME = {feature.name: feature for feature in FEATURES}
