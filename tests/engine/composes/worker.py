# SPDX-License-Identifier: Apache-2.0
"""One engine with one feature: what it says of its components, and whether answers are those of a cold run.

    echo '{"feature": "lora", "scratch": "/tmp/x"}' | python -m tests.engine.composes.worker

A process of its own; the result is JSON on the last line.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.engine.composes.features import BY_NAME, SCRATCH, Feature
from tests.support.engine_configuration import CHOSEN

CHOSEN.apply()

from mmcache_tools.harness.engines import EngineConfig, ZooRig  # noqa: E402
from mmcache_tools.zoo import build_cached  # noqa: E402

from tests.engine.composes.transfer import register  # noqa: E402
from tests.engine.composes.ways import WAYS, Said  # noqa: E402
from tests.engine.speculative.drafters import speculative_config  # noqa: E402
from vllm_mmcache.exactness.answers import Message  # noqa: E402
from vllm_mmcache.exactness.conversations import filler, picture, user  # noqa: E402


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    task = json.load(sys.stdin)
    print(json.dumps(run(BY_NAME[task["feature"]], Path(task["scratch"]))), flush=True)


def run(feature: Feature, scratch: Path) -> dict[str, Any]:
    """Start and ask. What stops it is a result, too."""
    model = build_cached(feature.family, scratch / "zoo")
    arguments = json.loads(json.dumps(feature.engine).replace(SCRATCH, str(scratch)))
    drafter = arguments.get("speculative_config", {}).get("drafter")
    if drafter is not None:
        model, arguments["speculative_config"] = speculative_config(drafter, model, scratch)
    if "weight_transfer_config" in arguments:
        register()
    stage, began = "start", time.monotonic()
    try:
        rig = ZooRig(EngineConfig(feature.family, more=tuple(arguments.items())), model)
        components = components_of_engine()
        stage = "answers"
        found = ask(rig, feature, scratch)
    except Exception as error:  # whatever vLLM raises; the test compares
        return {"stage": stage, "error": f"{type(error).__name__}: {error}"[:600]}
    return {"stage": "end", "components": components, "seconds": round(time.monotonic() - began), **found}


def components_of_engine() -> dict[str, str]:
    """What the report says; nothing without the plugin."""
    from vllm_mmcache.base import status

    return {component: str(state) for component, state in status.in_force().items()}


def question(feature: Feature, number: int, words: str = "What is in this picture?") -> list[Message]:
    """About a picture, with as much text before and behind it as the feature wants."""
    return [user(filler(feature.tokens_before), picture(number), words + filler(feature.tokens_behind))]


def ask(rig: ZooRig, feature: Feature, scratch: Path) -> dict[str, Any]:
    """Warm in each way that a component reuses something, then each question cold."""
    put = WAYS[feature.way]

    def count(conversation: list[Message]) -> tuple[Said, int]:
        before = num_reused(rig)
        said = put(rig, conversation)
        return said, num_reused(rig) - before

    runs = tower_runs(rig)

    def make_cold() -> None:
        rig.make_cold()
        for folder in scratch.glob("*ExampleConnector"):
            shutil.rmtree(folder)

    same, second, other = question(feature, 80), question(feature, 80, "How many are there?"), question(feature, 81)
    asked = {"first": count(same), "again": count(same), "second": count(second), "other": count(other)}
    rig.forget_all_but_features()
    before = len(runs)
    asked["features"] = count(same)
    tower = len(runs) - before
    cold = {}
    for name, conversation in {"first": same, "second": second, "other": other}.items():
        make_cold()
        cold[name] = count(conversation)
    make_cold()
    return {
        "asked": {name: asdict(said) for name, (said, _) in asked.items()},
        "cold": {name: asdict(said) for name, (said, _) in cold.items()},
        "reused": {name: reused for name, (_, reused) in asked.items()},
        "reused_cold": sum(reused for _, reused in cold.values()),
        "tower": tower,
        # A grammar takes its part of the probabilities before they are told.
        "from_transformers": None if feature.way == "structured" else from_transformers(rig, same, asked["first"][0]),
        "accepted": int(counted(rig, "vllm:spec_decode_num_accepted_tokens")),
    }


def tower_runs(rig: ZooRig) -> list[int]:
    """Grows by one whenever the tower runs, from now on; the component's own counter stands still where it is off."""
    model, runs = rig.runner.model, []
    embed = model.embed_multimodal

    def counting(**pixels: Any) -> Any:
        runs.append(1)
        return embed(**pixels)

    model.embed_multimodal = counting
    return runs


def from_transformers(rig: ZooRig, conversation: list[Message], said: Said) -> float | None:
    """How far the first sequence's log-probabilities are from Transformers'; None where they need not be near."""
    if rig.dtype is not torch.float32 or rig.has_other_kv or not said.tokens:
        return None
    prompt, images = rig.render(conversation)
    _, expected = rig.oracle.log_probabilities(prompt, images, said.tokens[0])
    return max(
        abs(value - float(expected[number, token]))
        for number, step in enumerate(said.logprobs[0])
        for token, value in step.items()
    )


def counted(rig: ZooRig, *names: str) -> float:
    return sum(getattr(metric, "value", 0) for metric in rig.llm.get_metrics() if metric.name in names)


def num_reused(rig: ZooRig) -> int:
    """Tokens of prompts that were not computed, so far: of the KV cache, and of a connector."""
    return int(counted(rig, "vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits"))


if __name__ == "__main__":
    main()
