# SPDX-License-Identifier: Apache-2.0
"""What mmcache adds to a model with a vision tower: its runs are counted, its weights known. Worker process.

A mixin before vLLM's own class, whose forward pass, weights and processor stay as they are. The feature store works
only with models that have it: which modules the features come from, and what an image is in a batch, is written down
here for families that this project's tests run.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vllm_mmcache import events, settings
from vllm_mmcache.models.digests import watch_loading


class CountedTower:
    """Accounts the tower's runs, and runs it image by image where the setting tower_one_by_one asks for it.

    Shapes: pixel_values (rows of all images, ...); the tensor `sizes_key` has one row per image.
    """

    tower_parts: tuple[str, ...] = ("visual",)
    """Modules that images go through, as named here and in the weights' names."""
    sizes_key = "image_grid_thw"

    loaded_weights: dict[str, str] | None = None
    """Digest of each weight of the tower that was loaded, by its name; None before."""
    num_loads = 0
    """How often weights were loaded; features of an earlier count may be outdated."""
    before_tower: Callable[[int], None] | None = None
    """Told the number of images before the tower runs; the feature store's trap."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights as vLLM does, noting those of the tower; also a part of them, as an update does."""
        if self.loaded_weights is None:
            self.loaded_weights = {}
        try:
            loaded: set[str] = super().load_weights(  # type: ignore[misc]
                watch_loading(weights, self.tower_parts, self.loaded_weights)
            )
        finally:
            self.num_loads += 1
        return loaded

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Run the tower as vLLM does; one image at a time where asked, so that features don't depend on the batch."""
        pixels, sizes = kwargs.get("pixel_values"), kwargs.get(self.sizes_key)
        if not isinstance(pixels, torch.Tensor) or not isinstance(sizes, torch.Tensor):
            return super().embed_multimodal(**kwargs)  # type: ignore[misc]
        rows = self.rows_of(sizes)
        if self.before_tower is not None:
            self.before_tower(len(rows))
        start = time.perf_counter()
        embed = super().embed_multimodal  # type: ignore[misc]
        if settings.current().tower_one_by_one and len(rows) > 1:
            parts = zip(pixels.split(rows), sizes.split(1), strict=True)
            runs = [embed(**kwargs | {"pixel_values": part, self.sizes_key: size}) for part, size in parts]
            outputs: Any = tuple(features for run in runs for features in run)
        else:
            outputs = embed(**kwargs)
        events.TOWER_SECONDS.add(time.perf_counter() - start)
        events.TOWER_IMAGES.add(len(rows))
        events.TOWER_PATCHES.add(self.patches_of(pixels))
        return outputs

    def rows_of(self, sizes: torch.Tensor) -> list[int]:
        """How many rows of pixel_values each image has. Shapes: (num_images, 3), patches by time, height, width."""
        rows: list[int] = sizes.prod(-1).tolist()
        return rows

    def patches_of(self, pixels: torch.Tensor) -> int:
        """How many patches these pixels are."""
        return len(pixels)
