# SPDX-License-Identifier: Apache-2.0
"""Questions about images to a tiny Qwen3.5 that drafts with its MTP head on V2, each token against a cold run.

Run with `python -m tests.engine.speculative.image_worker`, a task on stdin, a JSON object on the last line of stdout.
Requests join and leave while others decode; some are given up in between and put again. Every answer is put once more
as a prompt whose log-probabilities are asked for: these vLLM computes without prefix hit and without drafts.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engine_configuration import CHOSEN

CHOSEN.apply()

from mmcache_tools.harness.engines import EngineConfig, ZooRig  # noqa: E402
from vllm import SamplingParams  # noqa: E402

from tests.engine.speculative.hybrid_vllm import faulty, one_program_per_copy  # noqa: E402
from tests.engine.speculative.hybrid_worker import with_head, words  # noqa: E402
from tests.engine.speculative.worker import counters  # noqa: E402
from vllm_mmcache.base import status  # noqa: E402
from vllm_mmcache.exactness.answers import Answer  # noqa: E402
from vllm_mmcache.exactness.conversations import filler, picture, user  # noqa: E402
from vllm_mmcache.metrics import counters as ours  # noqa: E402

SIZE = (448, 448)  # pixels of a picture: 196 tokens, more than a block


@dataclass(frozen=True)
class Phase:
    """Requests to an engine that has forgotten those before."""

    num_requests: int = 12
    aborts: bool = False  # every third request is given up once it was scheduled, and put again at once
    is_on: bool = True  # the component
    fault: str | None = None  # of hybrid_vllm.faulty
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """An engine, and what it is asked."""

    scratch: str
    phases: list[Phase]
    num_drafted: int = 2  # in a step
    num_blocks: int | None = None
    num_seqs: int = 3
    batched_tokens: int = 2048  # of all requests in a step


@dataclass
class Asked:
    """One request: what it says, and what came of it."""

    number: int
    prompt: list[int]  # an image is one token here, which vLLM widens
    images: list[Any]
    num_tokens: int  # of the answer
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    length: int = 0  # of the prompt, with all tokens of its images
    image_ends: list[int] = field(default_factory=list)
    is_given_up: bool = False


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    given = json.load(sys.stdin)
    task = Task(**given | {"phases": [Phase(**phase) for phase in given["phases"]]})
    one_program_per_copy()
    drafter = {"method": "mtp", "num_speculative_tokens": task.num_drafted}
    config = EngineConfig(
        "qwen3.5", num_blocks=task.num_blocks, num_seqs=task.num_seqs, batched_tokens=task.batched_tokens,
        max_tokens=1280, more=(("speculative_config", drafter),),
    )  # fmt: skip
    rig = ZooRig(config, with_head(Path(task.scratch)))
    CHOSEN.check(rig)
    try:
        print(json.dumps([run(rig, task, phase) for phase in task.phases]), flush=True)
    finally:
        rig.close()


def run(rig: ZooRig, task: Task, phase: Phase) -> dict[str, Any]:
    """Ask, and ask for the cold ones."""
    rig.make_cold()
    state = status.in_force()["image_checkpoints"]
    before = numbers(rig)
    is_on = status.is_on("image_checkpoints")
    status._is_on["image_checkpoints"] = is_on and phase.is_on
    try:
        with faulty(phase.fault):
            answers = put(rig, task, phase)
    finally:
        status._is_on["image_checkpoints"] = is_on
    counted = {name: value - before[name] for name, value in numbers(rig).items()}
    said = [
        {
            "number": one.number, "cached": one.cached, "length": one.length, "image_ends": one.image_ends,
            "tokens": one.tokens, "errors": errors(rig, one),
        }
        for one in answers
    ]  # fmt: skip
    return {**counted, "state": str(state), "block_tokens": rig.block_tokens, "answers": said}


def numbers(rig: ZooRig) -> dict[str, int]:
    """Of drafts, checkpoints and preemptions so far."""
    kept = {name: int(count) for name, count in ours.totals().items() if name.startswith("checkpoints_")}
    return {**counters(rig), **kept, "preemptions": rig.num_preemptions()}


def asks(rig: ZooRig, phase: Phase) -> list[Asked]:
    """Few beginnings and pictures, so that many are shared: mostly one picture, sometimes two, or text alone."""
    rng = random.Random(phase.seed)
    tokenizer = rig.oracle.processor.tokenizer
    pictures = [picture(number, SIZE) for number in range(2)]
    found = []
    for number in range(phase.num_requests):
        parts: list[Any] = [filler(rng.choice([170, 330]), 7)]
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
            parts += [pictures[rng.randint(0, 1)], filler(rng.choice([2, 90]), 3)]
        prompt, images = rig.render([user(*parts, filler(rng.choice([60, 180]), number))])
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        found.append(Asked(number, ids, list(images), rng.randint(6, 30)))
    return found


def put(rig: ZooRig, task: Task, phase: Phase) -> list[Asked]:
    """All requests, two more of them in each step while there is room, and for each that ended one that goes on."""
    allowed = words(Path(task.scratch))
    rng = random.Random(phase.seed + 1)
    waiting = asks(rig, phase)
    running: dict[str, Asked] = {}
    ended: list[Asked] = []
    engine = rig.llm.llm_engine
    while waiting or running:
        while waiting and len(running) < task.num_seqs + 1 and rng.random() < 0.7:
            one = waiting.pop(0)
            params = SamplingParams(
                max_tokens=one.num_tokens, temperature=0, logprobs=1, ignore_eos=True, allowed_token_ids=allowed
            )
            (name,) = rig.llm.enqueue([asked_for(one, one.prompt)], params, use_tqdm=False)
            running[name.partition("-")[0]] = one
        if not running:
            continue
        for output in engine.step():
            if not output.finished:
                continue
            one = running.pop(output.request_id)
            one.tokens, steps = list(output.outputs[0].token_ids), output.outputs[0].logprobs
            one.logprobs = [step[token].logprob for token, step in zip(one.tokens, steps, strict=True)]
            one.cached, one.length = output.num_cached_tokens, len(output.prompt_token_ids)
            one.image_ends = [end for _, end in rig.image_spans(Answer.of("", (), output))]
            ended.append(one)
            if len(one.images) == 1 and one.number < phase.num_requests:  # its conversation goes on
                more = rig.oracle.processor.tokenizer.encode(filler(20, one.number), add_special_tokens=False)
                goes_on = [*one.prompt, *one.tokens, *more]
                waiting.append(Asked(one.number + 1000, goes_on, one.images, 9))
        if phase.aborts:
            give_up(rig, running, waiting)
    return ended


def give_up(rig: ZooRig, running: dict[str, Asked], waiting: list[Asked]) -> None:
    """End every third request as soon as it was scheduled, when its step may still run; the same one comes again."""
    for request in list(rig.scheduler.running):
        name = request.request_id.partition("-")[0]
        one = running.get(name)
        if one is not None and one.number % 3 == 0 and not one.is_given_up:
            rig.llm.llm_engine.abort_request([request.request_id], internal=True)
            del running[name]
            one.is_given_up = True
            waiting.insert(0, one)


def asked_for(one: Asked, ids: list[int]) -> Any:
    return {"prompt_token_ids": ids} | ({"multi_modal_data": {"image": one.images}} if one.images else {})


def errors(rig: ZooRig, one: Asked) -> list[float]:
    """Per token of an answer, how far its log-probability is from the cold one."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (output,) = rig.llm.generate([asked_for(one, one.prompt + one.tokens)], params, use_tqdm=False)
    cold = output.prompt_logprobs[-len(one.tokens) :]
    return [abs(step[token].logprob - said) for token, said, step in zip(one.tokens, one.logprobs, cold, strict=True)]


if __name__ == "__main__":
    main()
