# SPDX-License-Identifier: Apache-2.0
"""The questions of a trial, as a server would get them: chat messages with pictures, through vLLM's own chat code.

They are rendered by the model's own tokenizer, chat template and processor, so what a model refuses is found here.
Engine process; nothing is put into a cache of vLLM or of ours.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import argsort_mm_positions
from vllm.renderers import ChatParams, renderer_from_config

from vllm_mmcache.base.errors import one_line
from vllm_mmcache.exactness.conversations import filler
from vllm_mmcache.exactness.pictures import ellipses, png_url
from vllm_mmcache.hooking.subclasses import vllms_renderers

PICTURE_PX = (448, 336)
"""Width and height of a picture: not square, so that rows and columns can't be mistaken for each other."""
MIN_WORDS = 40


class CannotRender(Exception):
    """The model takes no such question; the message says why."""


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation: tokens, and each picture's place, name and inputs of the vision tower."""

    token_ids: tuple[int, ...]
    features: tuple[MultiModalFeatureSpec, ...]
    pictures: tuple[str, ...]

    def start(self, number: int) -> int:
        """Of a picture's tokens in the prompt."""
        return int(self.features[number].mm_position.offset)

    def end(self, number: int) -> int:
        """Of a picture's tokens in the prompt, exclusive."""
        position = self.features[number].mm_position
        return int(position.offset + position.length)


class Prompts:
    """Renders questions for one engine; `close` ends the threads of vLLM's renderer."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises: CannotRender."""
        try:
            # Ours, which a process has that serves as well, would remember the trial's pictures.
            with vllms_renderers():
                self._renderer = renderer_from_config(_config_of_renderer(vllm_config))
        except Exception as error:  # of a tokenizer or a processor
            raise CannotRender(f"the model's tokenizer or processor could not be loaded: {one_line(error)}") from error
        self._config = vllm_config

    def render(self, before: int, parts: Sequence[str]) -> Prompt:
        """A user's message: `before` words, then the parts; one that begins with "picture" is the picture of that name.

        Raises: CannotRender.
        """
        content: list[dict[str, Any]] = [{"type": "text", "text": filler(before)}]
        names = tuple(part for part in parts if part.startswith("picture"))
        for part in parts:
            if part in names:
                content.append({"type": "image_url", "image_url": {"url": png_url(ellipses(part, PICTURE_PX))}})
            else:
                content.append({"type": "text", "text": part})
        message = {"role": "user", "content": content}
        template_arguments = {"add_generation_prompt": True, "tokenize": False}
        try:
            _, (rendered,) = self._renderer.render_chat(
                [[message]], ChatParams(chat_template_kwargs=template_arguments), skip_mm_cache=True
            )
        except Exception as error:  # of a chat template or a processor, which are the model's own
            raise CannotRender(f"a question with pictures could not be rendered: {one_line(error)}") from error
        if rendered.get("type") != "multimodal":
            raise CannotRender("a question with pictures was rendered without them")
        features = tuple(
            MultiModalFeatureSpec(
                data=rendered["mm_kwargs"][modality][index],
                modality=modality,
                identifier=rendered["mm_hashes"][modality][index],
                mm_position=rendered["mm_placeholders"][modality][index],
                mm_hash=rendered["mm_hashes"][modality][index],
            )
            for modality, index in argsort_mm_positions(rendered["mm_placeholders"])
        )
        if len(features) != len(names):
            raise CannotRender(f"a question with {len(names)} pictures was rendered with {len(features)}")
        return Prompt(tuple(rendered["prompt_token_ids"]), features, names)

    def close(self) -> None:
        """End the renderer's threads."""
        self._renderer.shutdown()


def _config_of_renderer(vllm_config: Any) -> Any:
    """The configuration, without a processor cache, and with two images in a prompt also where users may send one.

    A processor cache in shared memory can't be made a second time. How many images a prompt may have is the renderer's
    to check; the engine takes two wherever it takes one.
    """
    vllm_config = copy.copy(vllm_config)
    model_config = vllm_config.model_config = copy.copy(vllm_config.model_config)
    multimodal = model_config.multimodal_config = copy.copy(model_config.multimodal_config)
    multimodal.mm_processor_cache_gb = 0
    if multimodal.get_limit_per_prompt("image") == 1:
        multimodal.limit_per_prompt = copy.copy(multimodal.limit_per_prompt)
        multimodal.limit_per_prompt["image"] = replace(multimodal.limit_per_prompt["image"], count=2)
    return vllm_config
