# SPDX-License-Identifier: Apache-2.0
"""What the model classes of Qwen-VL, Gemma and PaliGemma say of their images. Pure, no vLLM.

That these are so is shown against Transformers' masks, the processors' prompts and what the towers make
(tests/unit/models, tests/engine/models).
"""

from typing import Any

from vllm_mmcache.models.protocol import ImageAttention, ImageModel, ImageTokens, VisualPackage


class _Model:
    """Images that attend as text does, and whose number of tokens depends on their size."""

    def attention(self, hf_config: Any) -> ImageAttention:
        """Causal, as text."""
        return ImageAttention()

    def num_tokens(self, hf_config: Any) -> int:
        """It depends on the image."""
        return 0

    def package(self, hf_config: Any) -> VisualPackage:
        """One row for each token, as wide as the language model is."""
        return VisualPackage(int(hf_config.get_text_config().hidden_size))


class QwenVL(_Model):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and their mixtures of experts."""

    def tokens(self, hf_config: Any) -> ImageTokens:
        """A mark before and a mark after each image."""
        return ImageTokens(hf_config.image_token_id, hf_config.vision_start_token_id, hf_config.vision_end_token_id)

    def package(self, hf_config: Any) -> VisualPackage:
        """With Qwen3-VL's DeepStack, whose levels come from inner layers of the tower."""
        levels = getattr(hf_config.vision_config, "deepstack_visual_indexes", None) or ()
        return VisualPackage(int(hf_config.get_text_config().hidden_size), len(levels), "image_grid_thw")


class Gemma3(_Model):
    """Gemma 3: images attend both ways in every layer, and all have the same number of tokens."""

    def tokens(self, hf_config: Any) -> ImageTokens:
        """A mark before and a mark after each image."""
        return ImageTokens(hf_config.image_token_index, hf_config.boi_token_index, hf_config.eoi_token_index)

    def attention(self, hf_config: Any) -> ImageAttention:
        """Both ways in every layer; what vLLM's runners leave out is longer than the window."""
        return ImageAttention(full=True, sliding=True, is_clamped=False)

    def num_tokens(self, hf_config: Any) -> int:
        """As the checkpoint says."""
        return int(hf_config.mm_tokens_per_image)


class Gemma4(_Model):
    """Gemma 4: images attend both ways in sliding layers alone."""

    def tokens(self, hf_config: Any) -> ImageTokens:
        """A mark before and a mark after each image."""
        return ImageTokens(hf_config.image_token_id, hf_config.boi_token_id, hf_config.eoi_token_id)

    def attention(self, hf_config: Any) -> ImageAttention:
        """Both ways in sliding layers, where the checkpoint says "vision"; else vLLM marks no image at all."""
        return ImageAttention(sliding=True)


class PaliGemma(_Model):
    """PaliGemma, which vLLM does not compute as it was trained."""

    def tokens(self, hf_config: Any) -> ImageTokens:
        """Image tokens alone, without marks."""
        return ImageTokens(hf_config.image_token_index)

    def attention(self, hf_config: Any) -> ImageAttention:
        """Both ways in every layer, and the text of the prompt, too, which vLLM does not do."""
        why = "the whole prompt attends both ways, also its text, and vLLM marks the image alone, on any platform"
        return ImageAttention(full=True, sliding=True, why_wrong=why)

    def num_tokens(self, hf_config: Any) -> int:
        """One for each patch."""
        vision = hf_config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2)


FACTS: dict[str, ImageModel] = {
    "Qwen2VLForConditionalGeneration": QwenVL(),
    "Qwen2_5_VLForConditionalGeneration": QwenVL(),
    "Qwen3VLForConditionalGeneration": QwenVL(),
    "Qwen3VLMoeForConditionalGeneration": QwenVL(),
    "Qwen3_5ForConditionalGeneration": QwenVL(),
    "Qwen3_5MoeForConditionalGeneration": QwenVL(),
    "Gemma3ForConditionalGeneration": Gemma3(),
    "Gemma4ForConditionalGeneration": Gemma4(),
    "PaliGemmaForConditionalGeneration": PaliGemma(),
}
"""By architecture: what the class says that is registered for it."""
