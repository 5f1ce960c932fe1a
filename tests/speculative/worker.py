# SPDX-License-Identifier: Apache-2.0
"""One side's engines, one after the other: what starts with which drafter, what it answers, how much was drafted.

Run with `python -m tests.speculative.worker`, a task on stdin; a JSON object on the last line of stdout.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.exactness.engines import NUM_LOGPROBS, EngineConfig, Message, Rig
from tests.exactness.scenarios import filler, picture, user
from tests.speculative.drafters import LETTERS, speculative_config
from vllm_mmcache.zoo import build_cached

NUM_ANSWERED = 24  # tokens of each answer

def questions(rig: Rig) -> list[dict[str, Any]]:
    """A picture, the same question again, another picture beside it, text alone, one more picture; three together."""
    first = [user(filler(60), picture(50), "What is in this picture?")]
    both = [user(filler(60), picture(50), picture(51), "Compare." + filler(20))]
    text, other = [user("Text only." + filler(80))], [user(picture(51), "And this?")]
    return [answer for turn in ([first], [first], [both, text, other]) for answer in ask(rig, turn)]


def ask(rig: Rig, conversations: list[list[Message]]) -> list[dict[str, Any]]:
    """Answers made of LETTERS; log-probabilities are those of the whole vocabulary."""
    tokenizer = rig.oracle.processor.tokenizer
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in LETTERS]
    params = SamplingParams(
        max_tokens=NUM_ANSWERED, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True, allowed_token_ids=letters
    )
    prompts: list[Any] = []
    for prompt, images in map(rig.render, conversations):
        prompts.append({"prompt": prompt} | ({"multi_modal_data": {"image": list(images)}} if images else {}))
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [[[i, entry.logprob] for i, entry in step.items()] for step in output.outputs[0].logprobs],
            "cached": output.num_cached_tokens,
        }
        for output in rig.llm.generate(prompts, params, use_tqdm=False)
    ]


def counters(rig: Rig) -> dict[str, int]:
    """vLLM's own counts of drafts and of their tokens."""
    values = {
        m.name: m.value
        for m in rig.llm.get_metrics()
        if m.name.startswith("vllm:spec_decode_num_") and hasattr(m, "value")
    }
    return {name: int(values[f"vllm:spec_decode_num_{name}"]) for name in ("drafts", "draft_tokens", "accepted_tokens")}


def try_drafter(family: str, drafter: str, prefix_caching: bool, model: Path, scratch: Path) -> dict[str, Any]:
    """Start, ask, close. What stops it is an outcome, too."""
    directory, speculative = speculative_config(drafter, model, scratch)
    more = (("speculative_config", speculative), ("enable_prefix_caching", prefix_caching))
    stage, rig = "start", None
    try:
        rig = Rig(EngineConfig(family, max_tokens=1024, more=more), directory)
        stage = "answers"
        return {"answers": questions(rig), **counters(rig), "plugin": rig.features is not None}
    except Exception as error:
        return {"stage": stage, "error": type(error).__name__, "says": str(error)[-400:]}
    finally:
        if rig is not None:
            rig.close()
        else:
            from vllm.distributed import cleanup_dist_env_and_memory

            gc.collect()
            cleanup_dist_env_and_memory()


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    task = json.load(sys.stdin)
    scratch = Path(task["scratch"])
    model = build_cached(task["family"], scratch)
    result = []
    for drafter, prefix_caching in task["drafters"]:
        start = time.perf_counter()
        result.append(try_drafter(task["family"], drafter, prefix_caching, model, scratch))
        result[-1]["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
