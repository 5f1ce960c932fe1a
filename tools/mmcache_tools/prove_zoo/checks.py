# SPDX-License-Identifier: Apache-2.0
"""The checks of one item on a model of the zoo: one engine, some components switched on, in a process of its own.

The scenarios' answers are held against Transformers; the rest is what vllm_mmcache/prove/checks.py has for all models.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from mmcache_tools.harness import scenarios
from mmcache_tools.harness.engines import WHOLE_STEPS, EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.oracle import assert_detects
from mmcache_tools.prove_zoo.items import ZooHow
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS
from vllm_mmcache.prove.checks import (
    USES,
    Row,
    alone_on_small_steps,
    arguments_of,
    assert_off,
    assert_on,
    assert_spoiled_kv_is_seen,
    engine_of,
    place_of,
    row_of,
    schedules_ahead,
    use_image_checkpoints,
    use_where_on,
)
from vllm_mmcache.prove.workloads import Shape

SHORT = (scenarios.same_again, scenarios.swapped_image)
SHAPES = {"qwen3.5": Shape((448, 448), 180), "gemma3": Shape((224, 224), 150)}
KV_BYTES = 1 << 30
SMALL_STEPS = 96  # tokens; an image of 64 fits, two don't


def check(
    family: str,
    components: Sequence[str],
    runner: str | None,
    precision: str | None,
    compiled: bool,
    short: bool,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """All checks of an item on a zoo model. No components is stock vLLM; no runner is the one that vLLM takes."""
    with tempfile.TemporaryDirectory() as root:
        pool = EnginePool(Path(root))
        rig = pool.get(config_of(family, components, precision, compiled, arguments))
        rows = [row_of("engine", lambda: assert_engine(rig, runner)), *rows_of(rig, components, short)]
        found = {"engine": engine_of(rig), "rows": [asdict(row) for row in rows], **place_of(rig)}
        pool.close()
    return found


def config_of(
    family: str, components: Sequence[str], precision: str | None, compiled: bool, arguments: Sequence[str] = ()
) -> EngineConfig:
    """The engine of an item; spans are whole or split only where steps are small."""
    small = SMALL_STEPS if alone_on_small_steps(components) else WHOLE_STEPS
    more: tuple[tuple[str, Any], ...] = (("enforce_eager", False),) if compiled else ()
    if not current_platform.is_cpu():  # several engines share a GPU; the models are tiny
        more += (("gpu_memory_utilization", 0.05), ("kv_cache_memory_bytes", KV_BYTES))
    more += tuple(arguments_of(arguments, ZooHow.fixed_arguments).items())
    return EngineConfig(family, batched_tokens=small, precision=precision, more=more)


def rows_of(rig: ZooRig, components: Sequence[str], short: bool) -> list[Row]:
    """Components in force, what they are for, answers of the scenarios, and the controls, which spoil the cache.

    What they are for comes first: checkpoints are given up where they don't pay, as in many of the scenarios.
    """
    rows = [row_of(f"{component} is on", partial(assert_on, rig, component)) for component in components]
    rows.append(row_of("nothing else is on", lambda: assert_off(set(ENGINE_COMPONENTS) - set(components))))
    shape = SHAPES.get(rig.config.family)
    uses = USES | {"image_checkpoints": partial(use_image_checkpoints, shape=shape)}

    def put(scenario: scenarios.Scenario) -> None:
        rig.make_cold()
        rig.assert_exact(scenario(rig))

    for component in components:
        if component in uses:
            rows.append(row_of(f"use of {component}", partial(use_where_on, rig, component, uses[component])))
    for scenario in SHORT if short else scenarios.MAIN:
        rows.append(row_of(scenario.__name__, partial(put, scenario)))
    rows.append(row_of("control: other image", lambda: assert_other_image_is_seen(rig)))
    rows.append(row_of("control: spoiled KV", lambda: assert_spoiled_kv_is_seen(rig)))
    return rows


def assert_engine(rig: ZooRig, runner: str | None) -> None:
    """Assert that vLLM took the model runner asked for, and with V2 async scheduling, as it does for users."""
    if runner is None:
        return
    module = type(rig.runner).__module__
    assert rig.vllm_config.use_v2_model_runner == (runner == "V2"), f"not {runner}: {module}"
    is_v2 = module.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))
    assert is_v2 == (runner == "V2"), f"not {runner}: {module}"
    assert schedules_ahead(rig) or runner == "V1", "V2 without async scheduling is not the engine that users run"


def assert_other_image_is_seen(rig: ZooRig) -> None:
    """Answers about two pictures are exact; each, judged as one about the other, is far out of tolerance."""
    rig.make_cold()
    answers = rig.ask(*[[user(filler(60), picture(number), "What is in this picture?")] for number in (30, 31)])
    rig.assert_exact(answers)
    assert_detects(answers[0], answers[1], rig.oracle)
    assert_detects(answers[1], answers[0], rig.oracle)
