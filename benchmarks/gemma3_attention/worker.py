# SPDX-License-Identifier: Apache-2.0
"""One side's measurements of Gemma 3, in a process of its own: exactness, splits under load, prefill time."""

import random
import time
from typing import Any

from vllm import SamplingParams

from vllm_mmcache.prove.engines import EngineConfig, EnginePool, Rig
from vllm_mmcache.prove.expect import step_deltas
from vllm_mmcache.prove.load import LOAD, conversations, counted
from vllm_mmcache.prove.scenarios import filler, picture, user
from vllm_mmcache.prove.tasks import run_task
from vllm_mmcache.zoo import ZooOptions, build


def correctness(pool: EnginePool, windows: list[int], steps: int) -> dict[str, Any]:
    """Everything that is counted and not timed, one engine after the other."""
    found = [exactness(pool, window) for window in windows]
    return {
        "max_delta_logprob": max(row["max_delta_logprob"] for row in found),
        "exactness": found,
        "load": splits(pool, steps),
        "adjacent": adjacent(pool),
    }


def exactness(pool: EnginePool, window: int) -> dict[str, Any]:
    """Largest |delta logprob| to Transformers on the cold prompt, contexts to 4,096 tokens, up to 6 images."""
    directory = build("gemma3", pool.zoo_root / f"window-{window}", options=ZooOptions(sliding_window=window))
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
    return {
        "window": window,
        "max_delta_logprob": worst,
        "answers": answers,
        "answers_wrong": wrong,
        "longest_prompt_tokens": longest,
    }


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
    return {
        "steps": counts["steps"],
        "spans_split": counts["split"],
        "requests_finished": finished,
        "requests_hung": unfinished,
    }


def prefill(pool: EnginePool, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of this process per prompt of about 1,500 tokens, with six images and with text alone.

    No text and no image comes twice, so nothing is cached and nothing needs to be forgotten between two prompts.
    """
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


if __name__ == "__main__":
    run_task({"correctness": correctness, "prefill": prefill})
