# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with a counted vision tower. Worker process."""

import torch
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration

from vllm_mmcache.models.tower import CountedTower


class CountedGemma3(CountedTower, Gemma3ForConditionalGeneration):
    """The same with a counted tower. An image is one picture and its pan-and-scan crops, a row of pixels each."""

    tower_parts = ("vision_tower", "multi_modal_projector")
    sizes_key = "num_patches"

    def rows_of(self, sizes: torch.Tensor) -> list[int]:
        """Shapes: (num_images,), pictures and crops of each."""
        rows: list[int] = sizes.tolist()
        return rows

    def patches_of(self, pixels: torch.Tensor) -> int:
        """Shapes: (num_crops, 3, height, width) in pixels."""
        side = self.config.vision_config.patch_size
        patches: int = len(pixels) * (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
        return patches
