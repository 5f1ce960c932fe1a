# SPDX-License-Identifier: Apache-2.0
"""One server's life with vLLM's ExampleConnector: questions, what was found for each, and the block keys after it.

Run with `python -m tests.engine.connectors.worker`, a task on stdin, a JSON list on the last line of stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mmcache_tools.harness.engines import EngineConfig, ZooRig
from mmcache_tools.harness.oracle import step_deltas
from mmcache_tools.zoo import build_cached
from PIL import Image

from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.exactness.answers import Answer
from vllm_mmcache.exactness.conversations import filler, picture, user

ENDS = ("inside", "end", "behind")
"""Where what the connector has ends: inside the image, at its end, behind it."""


def tier(directory: Path) -> tuple[tuple[str, Any], ...]:
    """The arguments of an engine whose KV is kept in files of this directory, by vLLM's ExampleConnector."""
    extra = {"shared_storage_path": str(directory)}
    config = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return (("kv_transfer_config", config),)


def found_tokens(num_prompt_tokens: int, block_tokens: int) -> int:
    """What ExampleConnector finds of a prompt that it has: whole blocks below the last two tokens."""
    return (num_prompt_tokens - 2) // block_tokens * block_tokens


def question(rig: ZooRig, ends: str, number: int) -> tuple[str, tuple[Image.Image, ...]]:
    """A prompt about the picture of a number, of a length such that what the connector has of it ends as asked."""
    tail = {"inside": "", "end": " lamp", "behind": filler(70)}[ends]
    for words in range(40, 40 + rig.block_tokens):
        prompt, images = rig.render([user(filler(words), picture(number), tail)])
        ids = rig.oracle.encode(prompt, images)["input_ids"][0].tolist()
        last = max(place for place, token in enumerate(ids) if token == rig.image_token_id) + 1
        first = ids.index(rig.image_token_id)
        found = found_tokens(len(ids), rig.block_tokens)
        fits = {
            "inside": first + 8 < found < last - 8,
            "end": found == last,
            "behind": found > last + rig.block_tokens,
        }
        if fits[ends] and (len(ids) - 1) % rig.block_tokens:  # else it looks for another name than it has given
            return prompt, images
    raise AssertionError(f"no prompt in which the connector's KV ends {ends}")


def told(rig: ZooRig, answer: Answer) -> dict[str, Any]:
    """An answer as plain data, with its distance from Transformers on the cold prompt."""
    _, expected = rig.oracle.log_probabilities(answer.prompt, answer.images, answer.token_ids)
    chosen = expected[range(len(answer.token_ids)), list(answer.token_ids)]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [list(step.items()) for step in answer.logprobs],
        "cached": answer.num_cached_tokens,
        "found": found_tokens(len(answer.prompt_ids), rig.block_tokens),
        "spans": rig.image_spans(answer),
        "error": max(step_deltas(answer, expected)),
        "worse": float((expected.max(-1).values - chosen).max()),
    }


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    task = json.load(sys.stdin)
    more = tier(Path(task["tier"])) + tuple(tuple(pair) for pair in task.get("more", []))
    rig = ZooRig(EngineConfig(task["family"], more=more), build_cached(task["family"], Path(task["zoo"])))
    CHOSEN.check(rig)
    answers = []
    for ask in task["asks"]:
        if ask.get("text"):
            prompt: Any = rig.render([user(ask["text"])])
        else:
            prompt = question(rig, ask["ends"], ask["number"])
        uuids = [[ask["uuid"]]] if ask.get("uuid") else None
        salts = [ask["salt"]] if ask.get("salt") else None
        if ask.get("cold"):
            rig.forget_all_but_features()
        answers.append(told(rig, rig.ask_rendered([prompt], [8], salts=salts, uuids=uuids)[0]))
        cached = rig.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        answers[-1]["keys"] = [bytes(key).hex() for key in cached]
    print(json.dumps(answers))
    rig.close()


if __name__ == "__main__":
    main()
