# SPDX-License-Identifier: Apache-2.0
"""Lazy images on a real engine of each later family: a known image is not decoded, and the answer stays the same.

The first families' servers are asked over HTTP in tests/system; this asks vLLM's chat API in the engine's own process,
where the same loader opens the images.
"""

import base64
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.zoo import MORE_FAMILIES
from vllm import SamplingParams

from tests.support import files
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer, Message
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.metrics import counters

pytestmark = pytest.mark.engine

CONFIGS = [pytest.param(EngineConfig(family), id=family) for family in MORE_FAMILIES]
QUESTION = "What is in this picture?" + filler(20)


def question(number: int) -> Message:
    return user(filler(180), picture(number), QUESTION)


def chat(rig: ZooRig, number: int) -> tuple[Answer, int]:
    """The answer about a picture sent as base64, and how many images were decoded for it."""
    prompt, images = rig.render([question(number)])
    text = base64.b64encode(files.saved(picture(number), "PNG")).decode()
    content: list[Any] = [
        {"type": "text", "text": filler(180)},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
        {"type": "text", "text": QUESTION},
    ]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    before = counters.IMAGES_DECODED.value
    (output,) = rig.llm.chat(
        [{"role": "user", "content": content}], params, use_tqdm=False, chat_template_content_format="openai"
    )
    decoded = int(counters.IMAGES_DECODED.value - before)
    return Answer.of(prompt, images, output), decoded


@pytest.mark.parametrize("config", CONFIGS)
def test_a_known_image_is_not_decoded(pool: EnginePool, config: EngineConfig) -> None:
    """Cold, then warm from every cache, then with vLLM's caches empty, where the processor opens the lazy image."""
    rig = pool.get(config)
    (cold, decoded), (warm, decoded_warm) = chat(rig, 900), chat(rig, 900)
    assert (decoded, decoded_warm) == (1, 0)
    assert (cold.num_cached_tokens, warm.num_cached_tokens > 0) == (0, True)
    other, decoded_other = chat(rig, 901)  # negative control
    assert decoded_other == 1
    assert other.token_ids != warm.token_ids
    rig.make_cold()
    late, decoded_late = chat(rig, 900)
    assert decoded_late == 1
    assert late.num_cached_tokens == 0
    (direct,) = rig.ask([question(900)])
    assert direct.prompt_ids == cold.prompt_ids == warm.prompt_ids == late.prompt_ids
    rig.assert_exact([cold, warm, other, late, direct])
