# SPDX-License-Identifier: Apache-2.0
"""One side's measurements of repeated questions about images, in a process of its own."""

import time
from typing import Any

from benchmarks.image_questions.workloads import SHAPES, WORKLOADS, reuse, run, unique
from benchmarks.tasks import run_task
from tests.exactness.engines import EngineConfig, EnginePool
from tests.exactness.scenarios import filler, picture, user
from vllm_mmcache import events


def workloads(pool: EnginePool, family: str) -> dict[str, Any]:
    """Cached and best possible tokens of each workload, each on a cold engine."""
    rig = pool.get(default(family))
    found: dict[str, Any] = {}
    for name, make in WORKLOADS.items():
        rig.make_cold()
        before = events.totals()
        start = time.perf_counter()
        answers = run(rig, make(SHAPES[family]))
        seconds = time.perf_counter() - start
        found[name] = {
            **reuse(rig, answers),
            "requests": len(answers),
            "seconds": round(seconds, 2),
            "counters": counted(before),
        }
    return {"block_tokens": rig.block_tokens, "workloads": found}


def unique_pictures(pool: EnginePool, family: str, requests: int) -> dict[str, Any]:
    """Hit tokens where every picture is unique, with a KV cache of a tenth of the working set."""
    shape = SHAPES[family]
    rig = pool.get(default(family))
    (_, answer), *_ = run(rig, unique(shape, 1))
    groups = len(rig.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers)
    blocks = requests * groups * -(-len(answer.prompt_ids) // rig.block_tokens) // 10
    rig = pool.get(default(family, num_blocks=blocks))
    before = events.totals()
    found = reuse(rig, run(rig, unique(shape, requests)))
    return {**found, "kv_blocks": blocks, "groups": groups, "counters": counted(before)}


def cold(pool: EnginePool, family: str, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token of cold prompts of 4,000 and 8,000 tokens with 1 and 4 images.

    Every prompt has words and pictures of its own, so nothing is reset between them: vLLM's reset_encoder_cache says
    that weights may have changed, and the feature store would take their fingerprint again within the measure.
    """
    rig = pool.get(default(family))
    times: dict[str, list[float]] = {}
    number = 0
    for round_ in range(-1, rounds):
        for tokens in (4000, 8000):
            for images in (1, 4):
                conversation = [user(f"{number}.", *cold_parts(family, tokens, images, number), "what")]
                number += 10
                start = time.perf_counter()
                (answer,) = rig.ask(conversation, max_tokens=1)
                assert answer.num_cached_tokens == 0
                if round_ >= 0:
                    times.setdefault(f"{tokens} tokens, {images} images", []).append(time.perf_counter() - start)
    return times


def cold_parts(family: str, tokens: int, images: int, number: int) -> list[Any]:
    """Text and images in turn that make a prompt of about so many tokens; others for each tenth `number`."""
    size = SHAPES[family].size
    of_image = 64 if family == "gemma3" else size[0] * size[1] // 1024
    words = (tokens - images * of_image) // (images + 1)
    parts: list[Any] = []
    for image in range(images):
        parts += [filler(words, image), picture(number + image, size)]
    return [*parts, filler(words, images)]


def default(family: str, num_blocks: int | None = None) -> EngineConfig:
    """vLLM's own block size and token budget."""
    return EngineConfig(
        family, block_tokens=None, batched_tokens=None, max_tokens=9216, num_blocks=num_blocks, num_images=10
    )


def counted(before: dict[str, float]) -> dict[str, float]:
    """What was counted since `before`."""
    return {name: n - before[name] for name, n in events.totals().items() if n != before[name]}


if __name__ == "__main__":
    run_task({"workloads": workloads, "unique": unique_pictures, "cold": cold})
