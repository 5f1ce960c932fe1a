# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes and pictures; the image spans that steps split are counted.

For the checks, tests and benchmarks.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_mmcache.components.image_spans.spans import image_spans
from vllm_mmcache.exactness.answers import Answer
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.prove.rig import Rig


def conversations(count: int, seed: int) -> list[Any]:
    """Few pictures and few texts in many orders, so that prefixes are shared and hits end inside images."""
    rng = random.Random(seed)
    return [
        [
            user(
                filler(rng.choice([3, 17, 40]), start=rng.randint(0, 1)),
                *(picture(rng.randint(0, 3)) for _ in range(rng.randint(0, 3))),
                filler(rng.randint(1, 30), start=rng.randint(0, 9)),
            )
        ]
        for _ in range(count)
    ]


@contextmanager
def counted(rig: Rig) -> Iterator[dict[str, int]]:
    """Counts the steps, the spans that a step's end splits, and the steps that were scheduled ahead.

    That is what the scheduler really put into each step. A step is ahead if the tokens of one before are not yet known.
    """
    scheduler = rig.llm.llm_engine.engine_core.engine_core.scheduler
    counts = {"steps": 0, "tokens": 0, "split": 0, "ahead": 0}
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        counts["ahead"] += any(request.num_output_placeholders for request in scheduler.running)
        output = original(*args, **kwargs)
        counts["steps"] += 1
        counts["tokens"] += output.total_num_scheduled_tokens
        for request_id in output.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            end = request.num_computed_tokens  # vLLM advances it when it schedules
            spans = image_spans(request) if request.mm_features else []
            counts["split"] += sum(first < end <= last for first, last in spans)
        return output

    scheduler.schedule = schedule
    try:
        yield counts
    finally:
        del scheduler.schedule


def run(rig: Rig, count: int, seed: int) -> list[Answer]:
    """Ask `count` conversations at once, for 1 to 12 tokens each; the same seed asks the same."""
    lengths = [random.Random(seed + i).randint(1, 12) for i in range(count)]
    return rig.ask(*conversations(count, seed), max_tokens=lengths)
