# SPDX-License-Identifier: Apache-2.0
"""What the engine tests of kept features look at: runs of the vision tower, features, and named images."""

from typing import Any

import torch
from mmcache_tools.harness.engines import ZooRig
from PIL import Image
from vllm import SamplingParams

from vllm_mmcache.components.features.engine.ram_tier import Slot
from vllm_mmcache.components.features.message import SEAL_BYTES
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer
from vllm_mmcache.exactness.conversations import filler, one, picture, user
from vllm_mmcache.metrics import counters


class Runs:
    """Images that the tower ran for since the last look."""

    def __init__(self) -> None:
        self._seen = self._total()

    def new(self) -> int:
        before, self._seen = self._seen, self._total()
        return self._seen - before

    @staticmethod
    def _total() -> int:
        return int(counters.TOWER_IMAGES.value)


def ask_about(rig: ZooRig, *numbers: int) -> list[Answer]:
    """A question about each of these pictures, one after the other."""
    return [one(rig, question(number)) for number in numbers]


def question(number: int) -> dict[str, Any]:
    """A question about a picture."""
    return user(filler(40), picture(number), "What is it?")


def ask_named(rig: ZooRig, number: int, name: str) -> Answer:
    """A question about a picture that the client calls `name`."""
    prompt, images = rig.render([question(number)])
    (answer,) = rig.ask_rendered([(prompt, images)], [8], uuids=[[name]])
    return answer


class Asked:
    """Questions to an engine whose steps the test makes. As a context; what is unanswered at its end is given up."""

    def __init__(self, rig: ZooRig) -> None:
        self.rig = rig
        self.answers: list[Answer] = []
        """In the order in which they ended."""
        self._prompts: dict[str, tuple[str, tuple[Image.Image, ...]]] = {}  # by request id

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *error: object) -> None:
        self.rig.llm.llm_engine.abort_request(list(self.rig.scheduler.requests), internal=True)

    def ask(self, message: dict[str, Any], max_tokens: int = 8) -> None:
        """Put a question, after those before it."""
        prompt, images = self.rig.render([message])
        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
        data = {"multi_modal_data": {"image": list(images)}} if images else {}
        (name,) = self.rig.llm.enqueue([{"prompt": prompt, **data}], params, use_tqdm=False)
        self._prompts[name.partition("-")[0]] = prompt, images  # vLLM adds to what it answers with

    def step(self, num_steps: int = 1) -> None:
        """Steps of the engine."""
        for _ in range(num_steps):
            for output in self.rig.llm.llm_engine.step():
                if output.finished:
                    self.answers.append(Answer.of(*self._prompts[output.request_id], output))

    def until(self, num_answers: int) -> list[Answer]:
        """Step until so many questions are answered; returns the answers so far."""
        while len(self.answers) < num_answers:
            self.step()
        return self.answers

    def num_running(self) -> int:
        """Requests that have been scheduled and go on."""
        return len(self.rig.scheduler.running)


def slots(rig: ZooRig) -> dict[str, Slot]:
    """What the RAM tier holds, by the key of its identity; the ranks are done with it."""
    assert rig.features.copying.wait(60)
    return dict(rig.features.store.ram._slots)


def features_by_image(rig: ZooRig) -> dict[str, torch.Tensor]:
    """A copy of the features in RAM, by the key of their identity. Shapes: (num_tokens * width,)."""
    return {key: _view(rig, slot).clone() for key, slot in slots(rig).items()}


def spoil(rig: ZooRig) -> int:
    """Give all features in RAM other values. Returns how many images they are of."""
    found = slots(rig)
    for slot in found.values():
        _view(rig, slot).mul_(-1)
    return len(found)


def forget_outputs(rig: ZooRig) -> None:
    """Empty vLLM's own caches, without saying that weights may have changed, as its resets do."""
    assert rig.llm.reset_prefix_cache()
    rig.scheduler.encoder_cache_manager.reset()
    cache = rig.runner.encoder_cache
    getattr(cache, "encoder_outputs", cache).clear()  # of runner V2, or of V1


def side(rig: ZooRig) -> Any:
    """The rank's side of the store, where the worker is in this process."""
    return rig.runner._mmcache_features


def _view(rig: ZooRig, slot: Slot) -> torch.Tensor:
    features = rig.features.store._arena.buffer(slot.offset, slot.num_bytes - SEAL_BYTES)
    return torch.frombuffer(features, dtype=getattr(torch, rig.features.ranks.dtype))
