# SPDX-License-Identifier: Apache-2.0
"""What the engine tests of kept features look at: runs of the vision tower, features, and named images."""

import torch

from vllm_mmcache import events
from vllm_mmcache.features.package import FEATURES
from vllm_mmcache.prove.engines import Answer, Rig
from vllm_mmcache.prove.scenarios import filler, picture, user


class Runs:
    """Images that the tower ran for since the last look."""

    def __init__(self) -> None:
        self._seen = self._total()

    def new(self) -> int:
        before, self._seen = self._seen, self._total()
        return self._seen - before

    @staticmethod
    def _total() -> int:
        return int(events.TOWER_IMAGES.value)


def ask_named(rig: Rig, number: int, name: str) -> Answer:
    """A question about a picture that the client calls `name`."""
    prompt, images = rig.render([user(filler(40), picture(number), "What is it?")])
    (answer,) = rig.ask_rendered([(prompt, images)], [8], uuids=[[name]])
    return answer


def features_by_image(rig: Rig) -> dict[str, torch.Tensor]:
    """What the RAM tier holds, by content id."""
    held = rig.features.store.ram._packages.values()
    return {identity.content_id: package.tensors[FEATURES] for identity, package in held}
