# SPDX-License-Identifier: Apache-2.0
"""Questions about image files, as clients send them, and what an engine did with their pixels."""

import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from mmcache_tools.harness.engines import ZooRig
from PIL import Image
from vllm import SamplingParams
from vllm.multimodal.media.image import ImageMediaIO

from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer, Message
from vllm_mmcache.metrics import counters


@dataclass(frozen=True)
class Work:
    """How many images were processed, deferred, had their pixels made, those late, and went through the tower."""

    processed: int = 0
    deferred: int = 0
    made: int = 0
    late: int = 0
    tower: int = 0

    @classmethod
    def so_far(cls) -> "Work":
        found = (
            counters.ITEMS_PROCESSED,
            counters.ITEMS_DEFERRED,
            counters.PIXELS_MADE,
            counters.PIXELS_MADE_LATE,
            counters.TOWER_IMAGES,
        )
        return cls(*(int(counter.value) for counter in found))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Asking:
    """Puts questions to an engine, and tells what it did for each lot of them."""

    def __init__(self, rig: ZooRig) -> None:
        self.rig = rig
        self.answers: list[Answer] = []
        self._seen = Work.so_far()

    def ask(self, *conversations: Sequence[Message], salt: str | None = None, **arguments: Any) -> Work:
        """Put conversations together; the images are opened from files, by vLLM's loader."""
        rendered = [self.rig.render(messages) for messages in conversations]
        prompts = [{**prompt_of(*one), **arguments} for one in rendered]
        if salt is not None:
            prompts = [{**prompt, "cache_salt": salt} for prompt in prompts]
        params = SamplingParams(max_tokens=8, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
        outputs = self.rig.llm.generate(prompts, params, use_tqdm=False)
        self.answers += [Answer.of(*one, output) for one, output in zip(rendered, outputs, strict=True)]
        return self.work()

    def work(self) -> Work:
        """What was done since the last look."""
        before, self._seen = self._seen, Work.so_far()
        return self._seen - before


def finish_reasons(rig: ZooRig, *conversations: Sequence[Message]) -> list[str | None]:
    """Why the answers ended."""
    prompts = [prompt_of(*rig.render(messages)) for messages in conversations]
    outputs = rig.llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].finish_reason for output in outputs]


def prompt_of(prompt: str, images: Sequence[Image.Image]) -> Any:
    """A prompt of vLLM's, with the images opened from files."""
    return {"prompt": prompt, "multi_modal_data": {"image": [opened(image) for image in images]}}


def opened(image: Image.Image, **options: Any) -> Any:
    """The image as vLLM's loader opens its file."""
    return ImageMediaIO(**options).load_bytes(png(image))


def png(image: Image.Image) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def forget_processed(rig: ZooRig) -> None:
    """As if images had fallen out of vLLM's processor cache; their features are kept."""
    assert rig.features.copying.wait(60)
    rig.llm.llm_engine.reset_mm_cache()
