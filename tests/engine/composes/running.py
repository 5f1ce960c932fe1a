# SPDX-License-Identifier: Apache-2.0
"""Runs a feature in a process of its own, and judges what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from mmcache_tools.zoo import BY_NAME

from tests.engine.composes.features import COMPONENT_NAMES, Feature
from tests.support.engine_configuration import CONFIGURATIONS

TOLERANCE = 1e-3  # of log-probabilities in float32, as everywhere
TIE = 1e-4
BF16_TOLERANCE = 0.5
VECTOR_TOLERANCE = 1e-4  # of an embedding's numbers; its length is 1
ASKS_ITSELF = ("several", "beam")  # ways whose own sequences share a prompt, so that cold questions reuse, too

Result = dict[str, Any]


def run(feature: Feature, scratch: Path, engine: str, **variables: str) -> Result:
    """What the worker says; its models stay below `scratch` for the next."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
    environ |= {"TEST_ENGINE": engine} | CONFIGURATIONS[engine].environment() | variables
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / f"{feature.name}.err").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.composes.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environ, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            task = json.dumps({"feature": feature.name, "scratch": str(scratch)})
            output, _ = process.communicate(task, timeout=600)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = (scratch / f"{feature.name}.err").read_text()
    if process.returncode or not output.strip():
        return {"stage": "process", "error": f"exit status {process.returncode}: {said[-600:]}"}
    result: Result = json.loads(output.strip().splitlines()[-1])
    return result


def judge(feature: Feature, result: Result, engine: str) -> float:
    """Assert what the table says; the largest difference of a log-probability to a cold run."""
    if (expected := feature.fails.get(engine)) is not None:
        assert result["stage"] == expected.stage, result
        assert expected.words in result["error"], result["error"]
        return 0.0
    assert result["stage"] == "end", result["error"]
    components, says = result["components"], feature.expected(engine)
    for component in COMPONENT_NAMES:
        if component in says:
            assert components[component] == says[component], f"{component}: {components[component]}"
        else:
            assert components[component] == "on" or components[component].startswith("unneeded"), (
                f"{component}: {components[component]}"
            )
    assert feature.way != "letters" or result["accepted"] > 0, "no draft was accepted, so nothing was tested"
    asked, cold, reused = result["asked"], result["cold"], result["reused"]
    tolerance = TOLERANCE if is_float32(feature) else BF16_TOLERANCE
    pairs = {"first": "first", "again": "first", "second": "second", "other": "other", "features": "first"}
    deltas = {name: difference(asked[name], cold[of]) for name, of in pairs.items()}
    assert max(deltas.values()) <= tolerance, deltas
    assert difference(asked["first"], asked["other"]) > 3 * tolerance, "another picture's answer would not be noticed"
    assert (result["from_transformers"] or 0.0) <= tolerance, "both attend to images as no one else does"
    assert reused["again"] > reused["other"], reused
    assert feature.way in ASKS_ITSELF or result["reused_cold"] == reused["first"] == 0, reused
    if components["image_checkpoints"] == "on" or BY_NAME[feature.family].keeps_all_kv:
        assert reused["second"] > reused["other"], reused
    # Who kept the picture's features: the component, vLLM's connector, or nobody, which is the control of the two.
    kept = components["features"] == "on" or "ec_transfer_config" in feature.engine
    assert (result["tower"] == 0) == kept, f"{result['tower']} runs of the vision tower"
    return max(deltas.values())


def is_float32(feature: Feature) -> bool:
    return BY_NAME[feature.family].dtype == "float32" and "kv_cache_dtype" not in feature.engine


def difference(one: Any, other: Any) -> float:
    """The largest of a log-probability or of a vector's number; infinite where tokens differ and are no ties.

    After a tie the answers go on from other tokens, and nothing more is compared.
    """
    worst = 0.0
    if one["vector"]:
        return (
            max(abs(a - b) for a, b in zip(one["vector"], other["vector"], strict=True)) * TOLERANCE / VECTOR_TOLERANCE
        )
    for mine, its, my_steps, its_steps in zip(
        one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True
    ):
        assert len(mine) == len(its) == len(my_steps) == len(its_steps)
        for left, right, here, there in zip(mine, its, my_steps, its_steps, strict=True):
            shared = here.keys() & there.keys()
            if not shared:
                return float("inf")
            worst = max(worst, *(abs(here[token] - there[token]) for token in shared))
            if left != right:
                gap = abs(here[str(left)] - here.get(str(right), float("inf")))
                if gap > max(TIE, 2 * worst):
                    return float("inf")
                break
    return worst
