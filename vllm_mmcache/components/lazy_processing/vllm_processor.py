# SPDX-License-Identifier: Apache-2.0
"""vLLM's own processor, run for one item in a thread of ours: its result is stock's, bit for bit. Any process.

vLLM processes what its cache lacks of a request in one go, so a processor gives for each item what it gives for it
alone, unless it goes past the cache by how many items there are; those are told by `is_for_one`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from vllm.config.multimodal import ImageDummyOptions, MultiModalDummyOptions, VideoDummyOptions
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.processor import ResolvedPromptUpdate

from vllm_mmcache.components.lazy_processing.vllm_item import Arguments
from vllm_mmcache.content.request_id import RequestScopedId

BLANK_PIXELS = 224
BLANK_FRAMES = 4

Processed = tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]
"""What a processor makes of one item: the item, and how its prompt changes."""


def is_for_one(processor: Any) -> bool:
    """Whether a processor may run for one item in a thread of ours.

    What it gives for an item must not depend on how many there are, and two threads must be able to run it at once.
    """
    own = "_cached_apply_hf_processor"
    shares_tokens = getattr(processor.info, "is_dynamic_tiler", False)  # of Nano Nemotron VL: the images of a request
    # Of Kimi-K3: Numba ends the process when two threads are in it.
    is_alone = type(getattr(processor.info, "image_processor", None)).__name__ == "KimiK25FusedVisionProcessor"
    is_stocks = getattr(type(processor), own, None) is getattr(BaseMultiModalProcessor, own)
    return is_stocks and not shares_tokens and not is_alone


def inputs_of(
    processor: Any, modality: str, media: Any, name: str | None, arguments: Arguments, loading: Any
) -> ProcessorInputs:
    """One item as vLLM's processor takes it, for a prompt without text, and past its cache."""
    return ProcessorInputs(
        [],
        processor.info.parse_mm_data({modality: [media]}, validate=False),
        {modality: [name]},
        hf_processor_mm_kwargs=arguments,
        media_io_kwargs=loading,
    )


def process(processor: Any, modality: str, media: Any, arguments: Arguments) -> Processed:
    """Run the processor for one item. Raises: what vLLM does for an item that can't be processed."""
    inputs = inputs_of(processor, modality, media, RequestScopedId("-"), arguments, {})
    made = processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
    return made.kwargs[modality][0], made.prompt_updates[modality][0]


def updates_of(processor: Any, inputs: ProcessorInputs, item: MultiModalKwargsItem) -> Sequence[ResolvedPromptUpdate]:
    """How the prompt changes for the one item of `inputs`, of which the processor gave `item`; its pixels may lack.

    Raises: what a model's own code raises, where it looks at pixels or the fields are none of such an item.
    """
    (modality,) = inputs.mm_data_items.keys()
    made = processor._get_mm_prompt_updates(
        inputs.mm_data_items, inputs.hf_processor_mm_kwargs, MultiModalKwargsItems({modality: [item]})
    )
    (updates,) = made[modality]
    return cast(Sequence[ResolvedPromptUpdate], updates)


def process_blank(processor: Any, modality: str, max_tokens: int) -> Processed:
    """What the processor makes of a small white image, or video of a few frames. Raises: what vLLM does."""
    small = {
        "image": ImageDummyOptions(count=1, width=BLANK_PIXELS, height=BLANK_PIXELS),
        "video": VideoDummyOptions(count=1, num_frames=BLANK_FRAMES, width=BLANK_PIXELS, height=BLANK_PIXELS),
    }
    inputs = processor.get_dummy_inputs(max_tokens, {modality: 1}, MultiModalDummyOptions({modality: small[modality]}))
    made = processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
    return made.kwargs[modality][0], made.prompt_updates[modality][0]


def patches_of_a_side(processor: Any) -> int:
    """How many patches a token has along each side, as Transformers' processors of grids say; 1 where none does."""
    found = getattr(getattr(processor.info.get_hf_processor(), "image_processor", None), "merge_size", None)
    return found if type(found) is int and found > 0 else 1


def embeds_by_size(processor: Any, size: tuple[int, int]) -> int | None:
    """How many embeddings an image of that size has by Transformers' own reckoning; None where it can't reckon.

    Units: size is (width, height) in pixels.
    """
    try:
        told = processor.info.get_hf_processor()._get_num_multimodal_tokens(image_sizes=[size[::-1]])
        return int(told.num_image_tokens[0])
    except Exception:  # not every processor has it, and those that have it differ
        return None


def use_one_core() -> None:
    """To be called by a thread of ours that processes. A team of OpenMP's in it would slow down the model's own.

    Not torch.set_num_threads, which vLLM's worker for the CPU replaces by a warning.
    """
    torch._C.set_num_threads(1)
