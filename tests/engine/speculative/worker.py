# SPDX-License-Identifier: Apache-2.0
"""One side's engines, one after the other: what starts with which drafter, what it answers, how much was drafted.

Run with `python -m tests.engine.speculative.worker`, a task on stdin, a JSON list on the last line of stdout. Only one
engine of a process may draft with ngram, and as the last: it imports numba, after which vLLM 0.32's CPU build can't
start another one ("'_lib_fn_wrapper' object has no attribute 'get'", from triton_utils/dispatcher.py).
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from mmcache_tools.harness.engines import EngineConfig, ZooRig
from mmcache_tools.zoo import build_cached
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tests.engine.speculative.drafters import LETTERS, speculative_config
from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Message
from vllm_mmcache.exactness.conversations import filler, picture, user

NUM_ANSWERED = 24  # tokens of each answer


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    task = json.load(sys.stdin)
    scratch = Path(task["scratch"])
    model = build_cached(task["family"], scratch)
    result = [run(task["family"], name, caching, model, scratch) for name, caching in task["drafters"]]
    print(json.dumps(result), flush=True)


def run(family: str, drafter: str, prefix_caching: bool, model: Path, scratch: Path) -> dict[str, Any]:
    """Start, ask, close. What stops it is an outcome, too: the stage and the class of the error."""
    directory, speculative = speculative_config(drafter, model, scratch)
    more = (("speculative_config", speculative), ("enable_prefix_caching", prefix_caching))
    stage, rig = "start", None
    try:
        rig = ZooRig(EngineConfig(family, max_tokens=1024, more=more), directory)
        CHOSEN.check(rig)
        stage = "answers"
        answers = questions(rig)
        found = {"answers": answers, "plugin": "vllm_mmcache.lifecycle.activation" in sys.modules, **counters(rig)}
        return {"stage": "end", "error": None, "says": "", **found}
    except Exception as error:  # whatever vLLM raises; the test compares both sides
        return {"stage": stage, "error": type(error).__name__, "says": str(error)[-400:]}
    finally:
        if rig is not None:
            rig.close()
        gc.collect()
        cleanup_dist_env_and_memory()


def questions(rig: ZooRig) -> list[dict[str, Any]]:
    """A picture, the same question again, then three together: another picture beside it, text alone, one picture."""
    first = [user(filler(60), picture(50), "What is in this picture?")]
    both = [user(filler(60), picture(50), picture(51), "Compare." + filler(20))]
    text, other = [user("Text only." + filler(80))], [user(picture(51), "And this?")]
    return [answer for turn in ([first], [first], [both, text, other]) for answer in ask(rig, turn)]


def ask(rig: ZooRig, conversations: list[list[Message]]) -> list[dict[str, Any]]:
    """Answers made of LETTERS; their log-probabilities are those of the whole vocabulary."""
    tokenizer = rig.oracle.processor.tokenizer
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in LETTERS]
    params = SamplingParams(
        max_tokens=NUM_ANSWERED, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True, allowed_token_ids=letters
    )
    rendered = [rig.render(conversation) for conversation in conversations]
    prompts: list[Any] = [
        {"prompt": prompt, "multi_modal_data": {"image": list(images)}} if images else {"prompt": prompt}
        for prompt, images in rendered
    ]
    answers = []
    for (prompt, images), output in zip(rendered, rig.llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens = list(output.outputs[0].token_ids)
        steps = [{i: entry.logprob for i, entry in step.items()} for step in output.outputs[0].logprobs]
        answers.append(
            {"tokens": tokens, "logprobs": [list(step.items()) for step in steps], "cached": output.num_cached_tokens}
        )
        if rig.config.dtype is torch.float32:
            answers[-1] |= against_transformers(rig, prompt, images, tokens, steps, letters)
    return answers


def against_transformers(
    rig: ZooRig, prompt: str, images: Any, tokens: list[int], steps: list[dict[int, float]], letters: list[int]
) -> dict[str, float]:
    """The largest error of a log-probability, and by how much a chosen letter is worse than the best one."""
    _, expected = rig.oracle.log_probabilities(prompt, images, tokens)
    errors = [abs(value - float(expected[i, token])) for i, step in enumerate(steps) for token, value in step.items()]
    worse = expected[:, letters].max(-1).values - expected[torch.arange(len(tokens)), tokens]
    return {"error": max(errors), "worse": float(worse.max())}


def counters(rig: ZooRig) -> dict[str, int]:
    """vLLM's own counts of drafts, of the tokens drafted, and of those accepted."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    values = {metric.name: getattr(metric, "value", 0) for metric in rig.llm.get_metrics()}
    return {name: int(values[f"vllm:spec_decode_num_{name}"]) for name in names}


if __name__ == "__main__":
    main()
