# SPDX-License-Identifier: Apache-2.0
"""Random requests in batches: images, lengths, salts and prefixes in many orders, for KV caches that are too small."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from mmcache_tools.harness.engines import ZooRig
from mmcache_tools.harness.oracle import Oracle
from PIL import Image

from vllm_mmcache.exactness.answers import Answer
from vllm_mmcache.exactness.conversations import filler, picture, user

BATCH = 6


def ask_mixed(rig: ZooRig, batches: int, size: tuple[int, int]) -> list[Answer]:
    """The answers to so many batches, one after the other; few prefixes and pictures, so that many are shared."""
    rng = random.Random(4)
    pictures = [picture(number, size) for number in range(4)]
    answers: list[Answer] = []
    for _ in range(batches):
        rendered, salts = [], []
        for _ in range(BATCH):
            parts: list[Any] = [filler(rng.choice([20, 170, 210]), rng.randint(0, 1))]
            for _ in range(rng.choice([0, 1, 1, 2])):
                parts += [pictures[rng.randint(0, 3)], filler(rng.choice([2, 90]), 3)]
            rendered.append(rig.render([user(*parts, filler(rng.randint(1, 60), rng.randint(0, 9)))]))
            salts.append(rng.choice([None, None, "one", "other"]))
        answers += rig.ask_rendered(rendered, [rng.randint(1, 24) for _ in rendered], salts)
    return answers


def assert_all_cold(rig: ZooRig, answers: Sequence[Answer]) -> None:
    """Every answer is that of a cold run; Transformers is asked once for each question and answer."""
    print(rig.assert_exact(answers, RememberingOracle(rig.oracle)))


class RememberingOracle(Oracle):
    """An oracle that answers what it was asked before from memory. Images are the same where they are one object."""

    def __init__(self, oracle: Oracle) -> None:
        self.processor, self.model = oracle.processor, oracle.model
        self._known: dict[Any, tuple[list[int], torch.Tensor]] = {}

    def log_probabilities(
        self, prompt: str, images: Sequence[Image.Image], token_ids: Sequence[int], **processor_kwargs: Any
    ) -> tuple[list[int], torch.Tensor]:
        asked = (prompt, *map(id, images), tuple(token_ids), repr(processor_kwargs))
        if asked not in self._known:
            self._known[asked] = super().log_probabilities(prompt, images, token_ids, **processor_kwargs)
        return self._known[asked]
