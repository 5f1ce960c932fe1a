# SPDX-License-Identifier: Apache-2.0
"""One side's cold requests, in a process of its own."""

import itertools
import statistics
import time
from typing import Any

from benchmarks.image_questions.worker import default
from benchmarks.image_questions.workloads import SHAPES
from vllm_mmcache import rooms
from vllm_mmcache.prove.engines import EnginePool, Rig
from vllm_mmcache.prove.scenarios import filler, picture, user
from vllm_mmcache.prove.tasks import run_task

ROOMS = ("image_checkpoints", "features")
CASES = tuple(itertools.product((4000, 8000), (1, 4)))  # tokens, images

_numbers = itertools.count()


def cold(pool: EnginePool, family: str, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token, by case.

    Every prompt has words and pictures of its own, so nothing is reset between them: vLLM's reset_encoder_cache says
    that weights may have changed, and the feature store would take their fingerprint again within the measure.
    """
    rig = pool.get(default(family))
    times: dict[str, list[float]] = {}
    for round_ in range(-1, rounds):
        for case in CASES:
            seconds = cold_request(rig, *case)
            if round_ >= 0:
                times.setdefault(case_name(*case), []).append(seconds)
    return times


def in_turn(pool: EnginePool, family: str, rounds: int) -> dict[str, dict[str, float]]:
    """The same cold requests in one process of the plugin, with a room of it on and off in turn: what the room costs.

    Ratios on / off, the median over pairs; two processes of the same side differ by more than this.
    """
    rig = pool.get(default(family))
    variants = {"on": {}, **{room: {room: False} for room in ROOMS}}
    ratios: dict[str, dict[str, float]] = {}
    for case in CASES:
        times: dict[str, list[float]] = {name: [] for name in variants}
        for round_ in range(rounds + 1):
            for name in list(variants)[:: 1 if round_ % 2 else -1]:
                rooms._is_on.update(dict.fromkeys(ROOMS, True) | variants[name])
                times[name].append(cold_request(rig, *case))
        ratios[case_name(*case)] = {
            room: round(
                statistics.median(on / off for on, off in zip(times["on"][1:], times[room][1:], strict=True)), 4
            )
            for room in ROOMS
        }
    return ratios


def cold_request(rig: Rig, tokens: int, images: int) -> float:
    """Seconds to the first token of a prompt that no request before had a block of."""
    number = next(_numbers)
    conversation = [user(f"{number}.", *cold_parts(rig.config.family, tokens, images, 10 * number), "what")]
    start = time.perf_counter()
    (answer,) = rig.ask(conversation, max_tokens=1)
    seconds = time.perf_counter() - start
    assert answer.num_cached_tokens == 0
    return seconds


def case_name(tokens: int, images: int) -> str:
    return f"{tokens} tokens, {images} images"


def cold_parts(family: str, tokens: int, images: int, number: int) -> list[Any]:
    """Text and images in turn that make a prompt of about so many tokens; others for each tenth `number`."""
    size = SHAPES[family].size
    of_image = 64 if family == "gemma3" else size[0] * size[1] // 1024
    words = (tokens - images * of_image) // (images + 1)
    parts: list[Any] = []
    for image in range(images):
        parts += [filler(words, image), picture(number + image, size)]
    return [*parts, filler(words, images)]


if __name__ == "__main__":
    run_task({"cold": cold, "in_turn": in_turn})
