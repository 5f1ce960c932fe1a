# SPDX-License-Identifier: Apache-2.0
"""What model classes say of their images is what their processors and configurations do."""

import pytest
from mmcache_tools.zoo import build_cached
from transformers import Gemma3Config, Gemma4Config, PaliGemmaConfig

from vllm_mmcache.models.facts import FACTS
from vllm_mmcache.models.protocol import ImageModel
from vllm_mmcache.models.vllm_registry import images_of
from vllm_mmcache.trial.vllm_prompts import Prompts

FAMILIES = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe", "gemma3", "gemma4")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_processor(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    from vllm.engine.arg_utils import EngineArgs

    model = build_cached(family, tmp_path_factory.getbasetemp() / "zoo")
    config = EngineArgs(str(model), dtype="float32", enforce_eager=True).create_engine_config()
    images = images_of(config.model_config)
    assert images is FACTS[config.model_config.architecture]
    prompts = Prompts(config)
    try:
        prompt = prompts.render(40, ("picture one", "What is it?", "picture two"))
    finally:
        prompts.close()
    tokens = images.tokens(config.model_config.hf_config)
    grid = images.package(config.model_config.hf_config).grid
    for feature in prompt.features:
        assert {name for name in feature.data if name.endswith("grid_thw")} == ({grid} if grid else set())
        ((first, last),) = feature.mm_position.extract_embeds_range()
        found = prompt.token_ids[first - 1 : last + 2]
        assert found == (tokens.begin, *[tokens.image] * (last - first + 1), tokens.end)
        most = images.num_tokens(config.model_config.hf_config)
        assert most in (0, last - first + 1)


def test_models_whose_images_all_have_one_length() -> None:
    vision = {"image_size": 224, "patch_size": 14}
    assert FACTS["PaliGemmaForConditionalGeneration"].num_tokens(PaliGemmaConfig(vision_config=vision)) == 256
    assert FACTS["Gemma3ForConditionalGeneration"].num_tokens(Gemma3Config(mm_tokens_per_image=49)) == 49
    assert FACTS["Gemma4ForConditionalGeneration"].num_tokens(Gemma4Config()) == 0


def test_all_say_everything() -> None:
    assert all(isinstance(images, ImageModel) for images in FACTS.values())
    assert not isinstance(object(), ImageModel)
