# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 on the CPU: exactness, images split under load, the endless request, CPU time of a prefill."""

import random
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from mmcache_tools.harness.engines import LOAD, EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.oracle import step_deltas
from mmcache_tools.zoo import ZooOptions, build

from benchmarks.results import SIDES, Result, in_turn, run_worker
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.prove.load import conversations, counted

BATCH = 64
STUCK_STEPS = 50  # in which nothing happens


def measure(options: Namespace) -> Result:
    """Both sides; what is timed is timed in several processes of each."""
    result = Result()
    times: dict[str, dict[str, list[float]]] = {}
    for side in in_turn(options.repeats):
        for case, seconds in run_worker("benchmarks.gemma3_attention:prefill", side, rounds=options.rounds).items():
            times.setdefault(case, {one: [] for one in SIDES})[side] += seconds
    for case, sides in times.items():
        result.add(case, "cpu_s", {side: median(found) for side, found in sides.items()})
    tasks = {"against Transformers": ("exactness", {"windows": options.windows})}
    tasks["random load"] = ("splits", {"steps": options.steps})
    for case, (call, task) in tasks.items():
        found = {side: run_worker(f"benchmarks.gemma3_attention:{call}", side, **task) for side in SIDES}
        result.add_sides({side: {(case, what): n for what, n in numbers.items()} for side, numbers in found.items()})
    return result


def exactness(root: Path, windows: list[int]) -> dict[str, Any]:
    """Largest |delta logprob| to Transformers on the cold prompt, contexts to 4,096 tokens, up to 6 images."""
    worst, wrong, longest, answers = 0.0, 0, 0, 0
    for window in windows:
        directory = build("gemma3", root / f"window-{window}", options=ZooOptions(sliding_window=window))
        rig = ZooRig(EngineConfig("gemma3", max_tokens=4224, batched_tokens=1024), directory)
        for num_images, num_words in ((1, 40), (2, 300), (6, 900), (6, 3500)):
            parts: list[Any] = []
            for number in range(num_images):
                parts += [filler(num_words // num_images, start=number), picture(number)]
            for question in ("what is this", "and what else"):  # the second finds the first's prefix
                (answer,) = rig.ask([user(*parts, question)])
                _, expected = rig.oracle.log_probabilities(answer.prompt, answer.images, answer.token_ids)
                worst = max(worst, *step_deltas(answer, expected))
                wrong += expected.argmax(-1).tolist() != list(answer.token_ids)
                longest = max(longest, len(answer.prompt_ids))
                answers += 1
        rig.close()
    return {"error": worst, "wrong_answers": wrong, "answers": answers, "longest_prompt_tokens": longest}


def splits(root: Path, steps: int) -> dict[str, int]:
    """Spans split over at least `steps` steps of random load, with vLLM's own guard on on both sides.

    A batch of requests in which nothing happens for STUCK_STEPS hangs; its unfinished requests are counted and aborted.
    """
    pool, hung, batches = EnginePool(root), 0, 0
    rig = pool.get(LOAD)
    engine = rig.llm.llm_engine
    engine.vllm_config.scheduler_config.disable_chunked_mm_input = True
    with counted(rig) as counts:
        while counts["steps"] < steps:
            batches += 1
            for number, conversation in enumerate(conversations(BATCH, batches)):
                rig.enqueue(conversation, random.Random(batches + number).randint(1, 12))
            idle, tokens = 0, counts["tokens"]
            while engine.has_unfinished_requests() and idle < STUCK_STEPS:
                engine.step()
                idle, tokens = idle + 1 if counts["tokens"] == tokens else 0, counts["tokens"]
            if stuck := list(rig.scheduler.requests):
                hung += len(stuck)
                engine.abort_request(stuck, internal=True)
                engine.step()
    pool.close()
    return {"steps": counts["steps"], "images_split": counts["split"], "hung": hung, "requests": BATCH * batches}


def prefill(root: Path, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of this process per prompt of about 1,500 tokens, with six images and with text alone.

    No text and no image comes twice, so nothing is cached and nothing needs to be forgotten between two prompts.
    """
    pool = EnginePool(root)
    rig = pool.get(EngineConfig("gemma3", max_tokens=2048, batched_tokens=2048))
    times: dict[str, list[float]] = {"prefill, six images": [], "prefill, text alone": []}
    for number in range(-2, rounds):
        images = [picture(6 * number + one) for one in range(6)]
        for (case, seconds), shown in zip(times.items(), (images, []), strict=True):
            asked = user(f"{case} {number}" + filler(1100 if shown else 1500), *shown, "what")
            start = time.process_time()
            (answer,) = rig.ask([asked], max_tokens=1)
            if number >= 0:
                seconds.append(time.process_time() - start)
            assert answer.num_cached_tokens == 0
    pool.close()
    return times
