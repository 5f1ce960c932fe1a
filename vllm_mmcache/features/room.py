# SPDX-License-Identifier: Apache-2.0
"""One model's view of the store: which package belongs to an image, and whether it may be used. Worker process.

Knows no vLLM: it is handed images as the tensors that the processor made of them, and gives back features or nothing.
With several tensor-parallel ranks, features are used only where every rank has them, since the tower's layers wait
for each other.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_mmcache import events, rooms, settings
from vllm_mmcache.errors import TowerTrapped
from vllm_mmcache.features.digests import inputs_digest
from vllm_mmcache.features.identity import Identity
from vllm_mmcache.features.package import FEATURES, GRID, Package
from vllm_mmcache.features.probe import Kind
from vllm_mmcache.features.store import Store
from vllm_mmcache.features.tower import Tower

logger = logging.getLogger("vllm.mmcache")


@dataclass(frozen=True)
class Item:
    """One image that vLLM wants encoded."""

    mm_hash: str
    """vLLM's name for it; a client may have chosen it."""
    inputs: Mapping[str, Any]
    """What the processor made of it, by name."""
    num_tokens: int
    """Rows that its features must have."""


@dataclass(frozen=True)
class Facts:
    """What features depend on beside image and weights. All text."""

    model: str
    """Class, vision configuration, platform and vLLM's version."""
    processor: str
    dtype: str


@dataclass(frozen=True)
class Layout:
    """Place in the tensor-parallel group; `agree` makes of one rank's findings those of all ranks."""

    rank: int
    size: int
    agree: Callable[[list[bool]], list[bool]]


class Room:
    """The store as one model sees it. One thread, the model runner's."""

    def __init__(self, tower: Tower, kind: Kind, store: Store, facts: Facts, layout: Layout) -> None:
        self.store = store
        self.tower = tower
        self._kind = kind
        self._facts = facts
        self._layout = layout
        self._expected: dict[str, tuple[Identity, Item]] = {}
        self._fingerprint = ("", "")  # the tower's, and this room's
        self._is_serving = False

    def fingerprint(self) -> str:
        """Digest of the vision weights as loaded and as they are now, and of what else makes features of an image."""
        weights = self.tower.fingerprint()
        if self._fingerprint[0] != weights:
            self._fingerprint = weights, inputs_digest({"facts": self._facts.model, "weights": weights})
        return self._fingerprint[1]

    def take(self, items: Sequence[Item | None]) -> list[torch.Tensor | None]:
        """Features of each image that the store has; the others are expected from the tower. None is no image.

        Shapes: (num_tokens, hidden * (1 + num_deepstack)), on the CPU, read only.
        """
        self._is_serving = True
        packages = [self._look_up(item) for item in items]
        has = self._layout.agree([found is not None and found[1] is not None for found in packages])
        observes = rooms.is_on("observe")
        features: list[torch.Tensor | None] = [None] * len(items)
        expected = []
        for index, (item, found) in enumerate(zip(items, packages, strict=True)):
            if item is None or found is None:
                continue
            identity, package, tier = found
            if has[index] and package is not None:
                features[index] = package.tensors[FEATURES]
                if observes:
                    events.note_feature_source(item.mm_hash, tier)
            else:
                expected.append((identity, item))
        self.expect(expected)
        events.TOWER_IMAGES_AVOIDED.add(sum(one is not None for one in features))
        return features

    def expect(self, items: Sequence[tuple[Identity, Item]]) -> None:
        """The tower runs for these images next."""
        self._expected = {item.mm_hash: (identity, item) for identity, item in items}

    def expected(self) -> list[str]:
        """What `take` found nothing for, and `save` was not given yet."""
        return list(self._expected)

    def save(self, mm_hash: str, features: torch.Tensor) -> None:
        """Keep what the tower gave for an image that was expected."""
        identity, item = self._expected.pop(mm_hash, (None, None))
        if identity is None or item is None:
            return
        events.TOWER_TOKENS.add(len(features))
        try:
            tensors = {FEATURES: features}
            if isinstance(grid := item.inputs.get(GRID), torch.Tensor):
                tensors[GRID] = grid
            package = Package.of(tensors)
            if how := misfit(package, item, self._kind):
                logger.warning("mmcache does not keep what the vision tower gave for an image: %s", how)
            else:
                self.store.save(identity, package)
        except Exception:
            logger.exception("mmcache could not keep the features of an image; serving goes on without them")

    def spring_trap(self, num_images: int) -> None:
        """Called before the tower runs. Raises: TowerTrapped, with the setting tower_trap, where it need not run."""
        in_force = settings.current()
        if not in_force.tower_trap or not rooms.is_on("features") or not self._is_serving:
            return
        held = [identity.content_id for identity, _ in self._expected.values() if self.store.has(identity)]
        if held or num_images > len(self._expected):
            raise TowerTrapped(
                f"the vision tower was entered for {num_images} images; {len(self._expected)} were not stored, and of "
                f"these the store holds {held}: unset MMCACHE_TOWER_TRAP outside tests"
            )

    def _look_up(self, item: Item | None) -> tuple[Identity, Package | None, str] | None:
        if item is None or any(name.endswith("embeds") for name in item.inputs):
            return None  # ready-made embeddings never meet the tower
        try:
            identity = Identity(
                content_id=f"{item.mm_hash}:{inputs_digest(item.inputs)}",
                model=self.fingerprint(),
                processor=self._facts.processor,
                dtype=self._facts.dtype,
                layout=f"{self._layout.rank}/{self._layout.size}",
            )
            package, tier = self.store.find(identity, lambda found: misfit(found, item, self._kind))
            return identity, package, tier
        except Exception:
            logger.exception("mmcache could not look up the features of an image; the vision tower runs")
            return None


def misfit(package: Package, item: Item, kind: Kind) -> str:
    """How a package differs from what this model makes of this image, in words; empty where it does not.

    One that was planted, or that another version of us wrote, can have the right identity and the wrong content.
    """
    features, grid, asked = package.tensors.get(FEATURES), package.tensors.get(GRID), item.inputs.get(GRID)
    expected = (item.num_tokens, kind.width)
    if features is None or tuple(features.shape) != expected or features.dtype != kind.dtype:
        seen = "none" if features is None else f"{tuple(features.shape)} {features.dtype}"
        return f"features {seen}, this model's are {expected} {kind.dtype}"
    if (grid is None) != (asked is None) or (grid is not None and not torch.equal(grid, asked)):
        return f"grid {grid}, this image's is {asked}"
    return ""
