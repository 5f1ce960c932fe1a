# SPDX-License-Identifier: Apache-2.0
"""Asks a loaded model whether what it makes of an image or a video depends on that alone, and what it looks like.

So no model class has to be listed: two small images, and where videos are taken two small videos, go through the
tower, each alone and both in one batch. Features that differ between these ways, or a tower that enters the language
model, have no place in a store. vLLM's own encoder cache rests on the same; this shows it, on the machine and in the
dtype that serve. Worker process, at start.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.content.digests import inputs_digest

SIDE_PIXELS = 224
NUM_FRAMES = 4
# Part of the distance of two images' features: a batch of another size adds up in another order.
MIXED = {torch.float32: 1e-3, torch.float64: 1e-3}
MIXED_IN_LOW_PRECISION = 0.15


class Unsupported(Exception):
    """Why this model's features can't be kept, in words."""


@dataclass(frozen=True)
class FeatureFormat:
    """What features of a modality look like; a package that looks otherwise is another model's."""

    width: int
    """Columns: hidden size, times the levels where a model has DeepStack."""
    sample: str
    """Digest of the features of two, which all ranks that share a copy must have alike."""


@dataclass(frozen=True)
class TrialInputs:
    """What a tower is tried with: two small images or videos as the model's processor makes them, on the CPU."""

    modality: str
    items: tuple[Any, Any]
    num_rows: int
    """The tokens that each of them stands for."""

    def digest(self) -> str:
        """Of shapes and contents: ranks whose towers are tried with something else may wait for each other for ever."""
        told = {
            f"{number}.{name}": element.data for number, item in enumerate(self.items) for name, element in item.items()
        }
        return inputs_digest({"rows": str(self.num_rows), **told})


def trial_inputs(vllm_config: Any, model: Any, modality: str) -> TrialInputs:
    """Make what the model's tower is tried with; runs nothing of the model, so nothing waits for another rank.

    Raises: Unsupported, or whatever the model's own processor raises.
    """
    if modality == "video" and hasattr(model, "requires_sequential_video_encoding"):
        raise Unsupported("its tower takes no two videos at once")
    one, num_rows = _item(vllm_config, modality)
    return TrialInputs(modality, (one, _altered(one)), num_rows)


def probe(vllm_config: Any, model: Any, tower: Tower, device: torch.device, inputs: TrialInputs) -> FeatureFormat:
    """Run the tower on one image (or video), on another, and on both.

    The ranks of a tower wait for each other in it: all of them call this, with inputs of one digest, or none.
    Shapes: what each gives must be (num_tokens, width) of the model's dtype.
    Raises: Unsupported, or whatever the model's own code raises.
    """
    modality, (one, other), num_rows = inputs.modality, inputs.items, inputs.num_rows
    entered: list[str] = []
    with ExitStack() as stack, torch.inference_mode():
        for module in tower.language_modules():
            hook = module.register_forward_pre_hook(lambda module, args: entered.append(type(module).__name__))
            stack.callback(hook.remove)
        (first,), (second,) = (_run(model, modality, [item], device) for item in (one, other))
        together = _run(model, modality, [one, other], device)
    if entered:
        raise Unsupported(f"its vision tower runs {entered[0]} of the language model")
    if first.ndim != 2 or len(first) != num_rows:
        raise Unsupported(f"{modality}s of {num_rows} tokens have features {tuple(first.shape)}")
    far = float((first - second).abs().max())
    if not far > 0:
        raise Unsupported(f"two {modality}s have the same features")
    mixed = max(float((a - b).abs().max()) for a, b in zip((first, second), together, strict=True)) / far
    if mixed > MIXED.get(first.dtype, MIXED_IN_LOW_PRECISION):
        raise Unsupported(f"what it makes of one of the {modality}s of a batch depends on the others, by {mixed:.1%}")
    if first.dtype != vllm_config.model_config.dtype:
        raise Unsupported(f"features are {first.dtype} in a model of {vllm_config.model_config.dtype}")
    return FeatureFormat(first.shape[1], inputs_digest({"first": first, "second": second}))


def takes(vllm_config: Any, modality: str) -> bool:
    """Whether the deployment takes images, or videos."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    processor = MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config)
    return bool(processor.info.allowed_mm_limits.get(modality))


def _item(vllm_config: Any, modality: str) -> tuple[Any, int]:
    """A small white image or video as the model's processor makes it, and the tokens that it stands for."""
    from vllm.config.multimodal import ImageDummyOptions, MultiModalDummyOptions, VideoDummyOptions
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing.context import TimingContext
    from vllm.utils.torch_utils import set_default_torch_num_threads

    model_config = vllm_config.model_config
    small = {
        "image": ImageDummyOptions(count=1, width=SIDE_PIXELS, height=SIDE_PIXELS),
        "video": VideoDummyOptions(count=1, num_frames=NUM_FRAMES, width=SIDE_PIXELS, height=SIDE_PIXELS),
    }
    with set_default_torch_num_threads():  # as vLLM does it at start, where more threads can hang
        processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        if not processor.info.allowed_mm_limits.get(modality):
            raise Unsupported(f"this deployment takes no {modality}s")
        inputs = processor.get_dummy_inputs(
            model_config.max_model_len, {modality: 1}, MultiModalDummyOptions({modality: small[modality]})
        )
        made = processor.apply(inputs, timing_ctx=TimingContext(enabled=False))
    return made["mm_kwargs"][modality][0], made["mm_placeholders"][modality][0].get_num_embeds()


def _altered(item: Any) -> Any:
    """The item with other pixels: its tensors of numbers or bytes drawn anew, grids and sizes as they are."""
    generator = torch.Generator().manual_seed(0)

    def draw(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:  # vLLM normalises some on the device
            return torch.randint(0, 256, value.shape, generator=generator, dtype=torch.uint8)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return torch.rand(value.shape, generator=generator).to(value.dtype) * 2 - 1
        if isinstance(value, list | tuple):
            return type(value)(draw(part) for part in value)
        return value

    return type(item)({name: replace(element, data=draw(element.data)) for name, element in item.items()})


def _run(model: Any, modality: str, items: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    found: list[torch.Tensor] = []
    for _, _, inputs in group_and_batch_mm_kwargs([(modality, item) for item in items], device=device):
        found.extend(model.embed_multimodal(**inputs))
    return found
