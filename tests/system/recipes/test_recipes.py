# SPDX-License-Identifier: Apache-2.0
"""The command lines of vLLM's own recipes, on real servers: what is on, the second question is a hit, and it is right.

Sources, all public: https://docs.vllm.ai/projects/recipes/en/latest/Qwen/Qwen3.5.html (Qwen3.6 with MTP),
https://recipes.vllm.ai/Qwen/Qwen3.5-397B-A17B (multimodal), https://recipes.vllm.ai/Qwen/Qwen3.6-35B-A3B (fp8 KV),
https://recipes.vllm.ai/Qwen/Qwen3-VL-235B-A22B-Instruct (images only), and
https://recipes.vllm.ai/google/gemma-4-31B-it (the server with all features).

Models are tiny ones of the same architecture. Left out is what a CPU or such a model does not have: the numbers of GPUs
and of tokens, `--gpu-memory-utilization`, `moe_backend`, `--attention-backend`, `--load-format`, quantized weights,
audio, `--trust-remote-code`, and the chat template of Gemma 4's tools, which is no part of vLLM's wheel. CI runs the
one with MTP, on model runner V2; `make matrix` all. The encoder's data parallel and the processor cache in shared
memory: ../deployments/test_composes.py, too. With two ranks and `--enable-expert-parallel`, vLLM 0.32's CPU kernel of
experts (cpu_fused_moe.cpp) ends in a segmentation fault, so this is left out, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.tolerances import BF16_SELF_TOLERANCE, TOLERANCE
from mmcache_tools.zoo import BY_NAME, build_cached

from tests.support.deployment import TWO_RANKS, Answer, Deployment, deployed
from tests.support.engine_configuration import CHOSEN
from tests.support.sizes import larger
from tests.support.target import png, url_of
from vllm_mmcache.exactness.conversations import filler
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES

pytestmark = pytest.mark.engine

ENCODER_DATA = ("--mm-encoder-tp-mode", "data")
SHM = ("--mm-processor-cache-type", "shm")
NO_SPANS = {"image_spans": "unneeded", "observe": "off"}  # nobody asked to observe
KEEPS_ALL = NO_SPANS | {"image_checkpoints": "unneeded", "inner_checkpoints": "unneeded"}
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')


@dataclass(frozen=True)
class Recipe:
    """One command line. Components that `not_on` leaves out are on."""

    family: str
    arguments: tuple[str, ...]
    not_on: dict[str, str]
    size: tuple[int, int] = (448, 448)  # pixels
    has_head: bool = False


RECIPES = {
    "qwen3.5-multimodal": Recipe(
        "qwen3.5-moe",
        (
            *TWO_RANKS, *ENCODER_DATA, *SHM, "--reasoning-parser", "qwen3",
            "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--enable-prefix-caching",
        ),
        NO_SPANS,
    ),
    "qwen3.6-mtp": Recipe(
        "qwen3.5", ("--reasoning-parser", "qwen3", "--async-scheduling", "--enable-prefix-caching", *MTP),
        NO_SPANS | {"inner_checkpoints": "off"},  # not shown to be right with drafts
        has_head=True,
    ),
    "qwen3.6-fp8-kv": Recipe(
        "qwen3.5",
        (
            "--kv-cache-dtype", "fp8", "--enable-chunked-prefill", "--async-scheduling", "--enable-prefix-caching",
            "--max-num-seqs", "8", "--skip-mm-profiling", "--enable-auto-tool-choice", "--tool-call-parser",
            "qwen3_xml", "--reasoning-parser", "qwen3",
        ),
        NO_SPANS,
    ),
    "qwen3-vl-images": Recipe(
        "qwen3-vl",
        ("--limit-mm-per-prompt.video", "0", "--async-scheduling", "--max-num-seqs", "128"),
        KEEPS_ALL,
    ),
    "gemma4": Recipe(
        "gemma4",
        (
            *TWO_RANKS, "--enable-auto-tool-choice", "--reasoning-parser", "gemma4", "--tool-call-parser", "gemma4",
            "--limit-mm-per-prompt", '{"image": 4}', "--async-scheduling",
        ),
        {"observe": "off", "inner_checkpoints": "unneeded"},
        size=(224, 224),
    ),
}  # fmt: skip
IN_CI = "qwen3.6-mtp"


def distance(mine: Answer, other: Answer) -> float:
    """The largest difference of a log-probability, up to the first token that another answer may have."""
    worst = 0.0
    for token, its, here, there in zip(mine.tokens, other.tokens, mine.logprobs, other.logprobs, strict=True):
        shared = here.keys() & there.keys()
        worst = max([worst, *(abs(here[one] - there[one]) for one in shared)])
        if token != its:
            return worst + abs(here[token] - here.get(its, float("-inf")))
    return worst


def ask(server: Deployment, size: tuple[int, int], number: int, question: str) -> Answer:
    """A question about picture `number`, greedy."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": filler(200)},
        {"type": "image_url", "image_url": {"url": url_of(png(number, size))}},
        {"type": "text", "text": question + filler(200, 3)},
    ]
    return server.answer(parts, max_tokens=8, timeout_s=300)


def model_of(recipe: Recipe, folder: Path) -> Path:
    """A tiny model; where the recipe drafts with MTP, one whose head agrees with it."""
    if not recipe.has_head:
        return build_cached(recipe.family, folder)
    from tests.engine.speculative.hybrid_worker import with_head  # imports vLLM

    return with_head(folder)


def marks(name: str) -> Any:
    return (pytest.mark.interpreter,) if name == IN_CI else (larger,)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in RECIPES])
def test_two_questions_about_one_image(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    is_float32 = BY_NAME[recipe.family].dtype == "float32" and "fp8" not in recipe.arguments
    precision = ("--dtype", "float32" if BY_NAME[recipe.family].dtype == "float32" else "bfloat16")
    with deployed(model_of(recipe, tmp_path), tmp_path / "log", *precision, *recipe.arguments) as server:
        found = {component: state for component, (state, _) in server.components().items()}
        needs_none = {"resumed_images": "unneeded"} if CHOSEN.runner == 2 else {}
        assert found == dict.fromkeys(COMPONENT_NAMES, "on") | recipe.not_on | needs_none, server.components()
        first = ask(server, recipe.size, 0, "What is it?")
        second = ask(server, recipe.size, 0, "How many are there?")
        other = ask(server, recipe.size, 1, "How many are there?")
        server.forget()
        cold = ask(server, recipe.size, 0, "How many are there?")
    tolerance = TOLERANCE if is_float32 else BF16_SELF_TOLERANCE
    print(CHOSEN, name, [one.num_cached for one in (first, second, other, cold)], distance(second, cold))
    assert first.num_cached == cold.num_cached == 0
    assert second.num_cached > other.num_cached
    assert distance(second, cold) <= tolerance
    assert distance(second, other) > tolerance, "the comparison sees another picture"
