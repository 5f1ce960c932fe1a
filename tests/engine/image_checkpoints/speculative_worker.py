# SPDX-License-Identifier: Apache-2.0
"""One engine with a drafter, questions about images put to it with the component and without.

Run with `python -m tests.engine.image_checkpoints.speculative_worker`, a task on stdin, JSON on the last line of
stdout; a process of its own, since after numba, which ngram imports, vLLM 0.32 can't start another engine on the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mmcache_tools.harness.engines import EngineConfig, ZooRig
from mmcache_tools.zoo import build_cached
from vllm import SamplingParams

from tests.engine.speculative.drafters import LETTERS, speculative_config
from tests.engine.speculative.worker import against_transformers, counters
from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.base import status
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer
from vllm_mmcache.prove.workloads import Shape, contents, put, questions, reusable, shared

NUM_ANSWERED = 24  # tokens of each answer
SHAPE = Shape((224, 224), 150)


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    task = json.load(sys.stdin)
    scratch = Path(task["scratch"])
    model = build_cached(task["family"], scratch)
    directory, speculative = speculative_config(task["drafter"], model, scratch)
    rig = ZooRig(EngineConfig(task["family"], max_tokens=1024, more=(("speculative_config", speculative),)), directory)
    CHOSEN.check(rig)
    found = {}
    for name, is_on in (("on", status.is_on("image_checkpoints")), ("off", False)):
        status._is_on["image_checkpoints"] = is_on
        found[name] = asked(rig, lookahead_tokens(rig, task["drafter"]))
    print(json.dumps(found), flush=True)


def lookahead_tokens(rig: ZooRig, drafter: str) -> int:
    """What must be equal behind a hit: what the keys of vLLM 0.33 cover there, or the block that 0.32 drops."""
    in_keys = int(getattr(rig.scheduler.kv_cache_manager.block_pool, "num_hash_lookahead_tokens", 0))
    return in_keys or (rig.block_tokens if drafter.startswith("eagle") else 0)


def asked(rig: ZooRig, lookahead_tokens: int) -> dict[str, Any]:
    """What three questions about each of two images, on empty caches, reused and answered, and what was drafted.

    lookahead_tokens: what an EAGLE head needs to be equal behind a hit.
    """
    rig.make_cold()
    before = counters(rig)
    answers = [answer for _, answer in put(lambda _, conversation: ask(rig, conversation), questions(SHAPE, 2, 3))]
    drafted = {name: value - before[name] for name, value in counters(rig).items()}
    seen: list[list[Any]] = []
    cached, best, errors = [], [], []
    for answer in answers:
        content = contents(rig, answer)
        longest = max((shared(content, other) for other in seen), default=0)
        cached.append(answer.num_cached_tokens)
        best.append(
            max(0, reusable(longest - lookahead_tokens, content[: len(content) - lookahead_tokens], rig.block_tokens))
        )
        errors.append(
            against_transformers(
                rig, answer.prompt, answer.images, list(answer.token_ids), list(answer.logprobs), letters(rig)
            )
        )
        seen.append([*content, *answer.token_ids])
    return {"cached": cached, "best": best, "errors": errors, "tokens": [a.token_ids for a in answers], **drafted}


def ask(rig: ZooRig, conversation: Any) -> Answer:
    """An answer made of LETTERS, so that a drafter can be right."""
    prompt, images = rig.render(conversation)
    params = SamplingParams(
        max_tokens=NUM_ANSWERED,
        temperature=0,
        logprobs=NUM_LOGPROBS,
        ignore_eos=True,
        allowed_token_ids=letters(rig),
    )
    asked_for: Any = [{"prompt": prompt, "multi_modal_data": {"image": list(images)}}]
    return Answer.of(prompt, images, rig.llm.generate(asked_for, params, use_tqdm=False)[0])


def letters(rig: ZooRig) -> list[int]:
    """The tokens of LETTERS."""
    tokenizer = rig.oracle.processor.tokenizer
    return [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in LETTERS]


if __name__ == "__main__":
    main()
