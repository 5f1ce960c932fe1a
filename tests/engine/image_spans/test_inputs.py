# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with unusual images: crops of one picture, more pictures than allowed, pictures in a text-only deployment."""

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.harness.tolerances import TOLERANCE
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_mmcache.exactness.answers import NUM_LOGPROBS
from vllm_mmcache.exactness.conversations import filler, one, picture, user

pytestmark = pytest.mark.engine

CONFIG = EngineConfig("gemma3")
TEXT_ONLY = EngineConfig("gemma3", num_images=0)
CROPS = {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 1.2, "pan_and_scan_min_crop_size": 64}


def test_pan_and_scan_crops_are_exact(pool: EnginePool) -> None:
    """Each crop is a span of its own within one placeholder range; cold and warm, against Transformers."""
    rig = pool.get(CONFIG)
    prompt, images = rig.render([user("See" + filler(40), picture(80, (600, 200)), "What is it?" + filler(30))])
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    question = {"prompt": prompt, "multi_modal_data": {"image": list(images)}, "mm_processor_kwargs": CROPS}
    for _ in range(2):
        (output,) = rig.llm.generate([question], params, use_tqdm=False)
        tokens = output.outputs[0].token_ids
        ids, expected = rig.oracle.log_probabilities(prompt, images, tokens, **CROPS)
        assert output.prompt_token_ids == ids
        assert ids.count(rig.image_token_id) > 64, "the picture was not cut into crops"
        assert expected.argmax(-1).tolist() == list(tokens)
        steps = enumerate(output.outputs[0].logprobs)
        assert max(abs(e.logprob - float(expected[i, t])) for i, step in steps for t, e in step.items()) <= TOLERANCE
    assert output.num_cached_tokens > 0


def test_more_images_than_allowed(pool: EnginePool) -> None:
    """vLLM's own error, and the engine goes on."""
    rig = pool.get(CONFIG)
    with pytest.raises(VLLMValidationError, match=r"At most 8 image\(s\) may be provided in one prompt"):
        rig.ask([user(*(picture(i) for i in range(9)), "count")])
    rig.assert_exact([one(rig, user(picture(0), "And now?"))])


def test_an_image_in_a_text_only_deployment(pool: EnginePool) -> None:
    """vLLM's own error for the image; text is served."""
    rig = pool.get(TEXT_ONLY)
    with pytest.raises(ValueError, match="Multi-modal processor not available for text-only models"):
        rig.ask([user(picture(0), "What is it?")])
    rig.assert_exact([one(rig, user("Only words." + filler(70)))])
