# SPDX-License-Identifier: Apache-2.0
"""Random conversations with pictures, salts, edits and a KV cache that is too small: sums and covers always hold."""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from tests.support.observing import assistant, observing, picture, system, user, words
from tests.support.sizes import SCALE, scaled
from vllm_mmcache.base import settings
from vllm_mmcache.components.observe.record.schema import Reason

pytestmark = pytest.mark.engine

NUM_REQUESTS = scaled(300)
FAMILIES = ("qwen3-vl",) if SCALE == 1 else ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3")


def num_pictures(talk: list[dict[str, Any]]) -> int:
    parts = [part for message in talk if isinstance(message["content"], list) for part in message["content"]]
    return sum(part["type"] == "image_url" for part in parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_hold_for_every_request(pool: EnginePool, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    num_blocks = 190 if family == "gemma3" else 100  # its two groups need as much for one request
    config = EngineConfig(
        family, num_blocks=num_blocks, batched_tokens=512, more=(("long_prefill_token_threshold", 128),)
    )
    talks: list[list[dict[str, Any]]] = []
    seen: collections.Counter[Reason] = collections.Counter()
    reused = 0
    with observing(pool, config) as ask:
        asked, salts = 0, ["a", "b"]
        while asked < NUM_REQUESTS:
            if asked >= NUM_REQUESTS // 2 and not settings.current().observe_across_salts:
                assert Reason.OTHER_SALT not in seen, "nobody has asked for it"
                across = settings.current().model_copy(update={"observe_across_salts": True})
                monkeypatch.setattr(settings, "_current", across)
                salts = ["c", "d"]
            if not talks or rng.random() < 0.2:
                talks.append(
                    [system("Rules:" + words(rng.choice([40, 60]))), user("Start." + words(rng.randrange(60)))]
                )
            talk = rng.choice(talks[-6:])
            if rng.random() < 0.1:
                talk[0] = system("Rules:" + words(rng.choice([40, 60]), rng.randrange(3)))
            if rng.random() < 0.3:
                talk[-1]["content"].append(picture(f"random {rng.randrange(6)}", (112, 112)))
            if num_pictures(talk) > 4 or len(talk) > 9:
                talks.remove(talk)
                continue
            if rng.random() < 0.2:
                prompts = [
                    {"prompt_token_ids": [100 + i % 200 for i in range(rng.randrange(20, 300))], "cache_salt": salt}
                    for salt in rng.choices(salts, k=3)
                ]
                got = ask.generate(*prompts, max_tokens=rng.randrange(1, 9))
            else:
                got = [ask.chat(*talk, max_tokens=rng.randrange(1, 9))]
                text = got[0].text if rng.random() < 0.7 else "Edited."
                talk += [assistant(text), user("More." + words(rng.randrange(40), rng.randrange(9)))]
            asked += len(got)
            for one in got:
                seen.update(one.reasons)
                reused += one.cached
    assert reused > 0
    assert seen[Reason.UNEXPLAINED] == 0, seen
    wanted = {Reason.NEW_CONTENT, Reason.BLOCK_TAIL, Reason.EVICTED, Reason.OTHER_SALT, Reason.TEMPLATE_REWROTE}
    assert wanted <= set(seen), seen
