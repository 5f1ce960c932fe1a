# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 on the CPU: exactness, images split under load, the endless request, CPU time of a prefill."""

import random
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from vllm import SamplingParams

from benchmarks.results import Result
from benchmarks.sides import SIDES, in_turn, run_worker
from vllm_mmcache.prove.engines import EngineConfig, EnginePool, Rig
from vllm_mmcache.prove.expect import step_deltas
from vllm_mmcache.prove.load import LOAD, conversations, counted
from vllm_mmcache.prove.scenarios import filler, picture, user
from vllm_mmcache.zoo import ZooOptions, build

PREFILLS = {"images": "prefill, six images", "text": "prefill, text alone"}


def measure(options: Namespace) -> Result:
    """Both sides; what is timed is timed in several processes of each."""
    result = Result()
    times: dict[str, dict[str, list[float]]] = {kind: {side: [] for side in SIDES} for kind in PREFILLS}
    for side in in_turn(options.repeats):
        for kind, seconds in run_worker("benchmarks.gemma3_attention:prefill", side, rounds=options.rounds).items():
            times[kind][side] += seconds
    for kind, case in PREFILLS.items():
        result.add(case, "cpu_s", {side: median(found) for side, found in times[kind].items()})
    call = "benchmarks.gemma3_attention:correctness"
    found = {side: run_worker(call, side, windows=options.windows, steps=options.steps) for side in SIDES}
    result.details = found
    for case, what in (("against Transformers", "error"), ("against Transformers", "wrong_answers"),
                       ("against Transformers", "answers"), ("against Transformers", "longest_prompt_tokens"),
                       ("random load", "steps"), ("random load", "images_split"), ("random load", "hung"),
                       ("random load", "requests"), ("two adjacent images", "finished")):  # fmt: skip
        result.add(case, what, {side: found[side][case][what] for side in SIDES})
    return result


def correctness(root: Path, windows: list[int], steps: int) -> dict[str, Any]:
    """Everything that is counted and not timed, one engine after the other."""
    found, pool = [exactness(root, window) for window in windows], EnginePool(root)
    most = {what: max(row[what] for row in found) for what in ("error", "longest_prompt_tokens")}
    sums = {what: sum(row[what] for row in found) for what in ("wrong_answers", "answers")}
    whole = {**most, **sums, "by_window": dict(zip(windows, found, strict=True))}
    result = {"against Transformers": whole, "random load": splits(pool, steps), "two adjacent images": adjacent(pool)}
    pool.close()
    return result


def exactness(root: Path, window: int) -> dict[str, Any]:
    """Largest |delta logprob| to Transformers on the cold prompt, contexts to 4,096 tokens, up to 6 images."""
    directory = build("gemma3", root / f"window-{window}", options=ZooOptions(sliding_window=window))
    rig = Rig(EngineConfig("gemma3", max_tokens=4224, batched_tokens=1024), directory)
    worst, wrong, longest, answers = 0.0, 0, 0, 0
    for num_images, num_words in ((1, 40), (2, 300), (6, 900), (6, 3500)):
        parts: list[Any] = []
        for i in range(num_images):
            parts += [filler(num_words // num_images, start=i), picture(i)]
        for question in ("what is this", "and what else"):  # the second finds the first's prefix
            (answer,) = rig.ask([user(*parts, question)])
            _, expected = rig.oracle.log_probabilities(answer.prompt, answer.images, answer.token_ids)
            worst = max(worst, *step_deltas(answer, expected))
            wrong += expected.argmax(-1).tolist() != list(answer.token_ids)
            longest = max(longest, len(answer.prompt_ids))
            answers += 1
    rig.close()
    return {"error": worst, "answers": answers, "wrong_answers": wrong, "longest_prompt_tokens": longest}


def splits(pool: EnginePool, steps: int) -> dict[str, int]:
    """Spans split over at least `steps` steps of random load, with vLLM's own guard on on both sides.

    A batch of 64 requests in which nothing happens for 50 steps hangs; its unfinished requests are counted and aborted.
    """
    rig = pool.get(LOAD)
    engine = rig.llm.llm_engine
    engine.vllm_config.scheduler_config.disable_chunked_mm_input = True
    finished = unfinished = seed = 0
    with counted(rig) as counts:
        while counts["steps"] < steps:
            seed += 1
            waiting = set()
            for i, conversation in enumerate(conversations(64, seed)):
                prompt, images = rig.render(conversation)
                params = SamplingParams(max_tokens=random.Random(seed + i).randint(1, 12), ignore_eos=True)
                question = {"prompt": prompt, "multi_modal_data": {"image": list(images)}} if images else prompt
                engine.add_request(f"{seed}-{i}", question, params)
                waiting.add(f"{seed}-{i}")
            idle, tokens = 0, counts["tokens"]
            while waiting and idle < 50:
                waiting -= {output.request_id for output in engine.step() if output.finished}
                idle = idle + 1 if counts["tokens"] == tokens else 0
                tokens = counts["tokens"]
            finished += 64 - len(waiting)
            unfinished += len(waiting)
            if waiting:
                engine.abort_request(list(waiting))
                engine.step()
    requests = {"requests": finished + unfinished, "hung": unfinished}
    return {"steps": counts["steps"], "images_split": counts["split"], **requests}


def prefill(root: Path, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of this process per prompt of about 1,500 tokens, with six images and with text alone.

    No text and no image comes twice, so nothing is cached and nothing needs to be forgotten between two prompts.
    """
    pool = EnginePool(root)
    rig = pool.get(EngineConfig("gemma3", max_tokens=2048, batched_tokens=2048))
    times: dict[str, list[float]] = {"images": [], "text": []}
    for round_ in range(-2, rounds):
        for kind in times:
            parts: list[Any] = [f"{kind} {round_}" + filler(1100 if kind == "images" else 1500)]
            parts += [picture(6 * round_ + i) for i in range(6)] if kind == "images" else []
            start = time.process_time()
            (answer,) = rig.ask([user(*parts, "what")], max_tokens=1)
            if round_ >= 0:
                times[kind].append(time.process_time() - start)
            assert answer.num_cached_tokens == 0
    pool.close()
    return times


def adjacent(pool: EnginePool) -> dict[str, Any]:
    """Whether two adjacent images finish where the encoder cache holds one image and a half."""
    rig = pool.get(EngineConfig("gemma3", batched_tokens=100, max_tokens=1024))
    engine = rig.llm.llm_engine
    prompt, images = rig.render([user(picture(1), picture(2), "compare")])
    engine.add_request(
        "a", {"prompt": prompt, "multi_modal_data": {"image": list(images)}}, SamplingParams(max_tokens=4)
    )
    for step in range(500):
        if any(output.finished for output in engine.step()):
            return {"finished": True, "steps": step + 1}
    return {"finished": False, "steps": 500}
