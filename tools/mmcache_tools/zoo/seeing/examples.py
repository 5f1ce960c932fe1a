# SPDX-License-Identifier: Apache-2.0
"""Conversations as tensors for training, equal to what the chat template and the Qwen3-VL processor make of them.

One conversation teaches all its answers at once: labels are the tokens of every assistant turn up to its end of turn.
Short ones are padded on the right, where causal attention never looks, so no mask is needed. tests/lab/zoo compares all
of it with the real processor and Transformers' own positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmcache_tools.zoo.seeing.pictures import SIZE_PIXELS
from mmcache_tools.zoo.seeing.prompts import Conversation

if TYPE_CHECKING:
    import numpy as np
    import torch

PATCH_PIXELS = 16
GRID = SIZE_PIXELS // PATCH_PIXELS  # 6 patches a side
SIDE_TOKENS = GRID // 2  # 2x2 patches become one token: 3 a side
IMAGE_TOKENS = SIDE_TOKENS**2
NO_LABEL = -100  # torch's cross entropy leaves these out


def patches(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The processor's pixel_values of pictures of 96x96 pixels.

    Shapes: (num_pictures, 96, 96, 3) uint8 -> (num_pictures * 36, 3 * 2 * 16 * 16) float32, patches of one token
    beside one another.
    """
    import numpy as np

    values = (pixels.astype(np.float32) / 255 - 0.5) / 0.5
    shape = (len(pixels), SIDE_TOKENS, 2, PATCH_PIXELS, SIDE_TOKENS, 2, PATCH_PIXELS, 3)
    ordered = values.reshape(shape).transpose(0, 1, 4, 2, 5, 7, 3, 6)  # (n, row, col, row2, col2, channel, y, x)
    twice = np.repeat(ordered[:, :, :, :, :, :, None], 2, axis=6)  # a still picture is two frames
    return twice.reshape(len(pixels) * GRID * GRID, -1)


class Encoder:
    """Token ids and labels of conversations; written out here because the chat template doesn't mark answers."""

    def __init__(self, tokenizer_json: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_str(tokenizer_json)
        self._known: dict[str, list[int]] = {}
        (self.image_token_id,) = self.ids("<|image_pad|>")

    def ids(self, text: str) -> list[int]:
        """Token ids of a text. The list is kept for the next time: don't change it."""
        if text not in self._known:
            self._known[text] = list(self._tokenizer.encode(text).ids)
        return self._known[text]

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Ids of the whole conversation, its last answer included, and which of them belong to answers."""
        pieces: list[tuple[str, bool]] = []
        if conversation.system is not None:
            pieces.append((f"<|im_start|>system\n{conversation.system}<|im_end|>\n", False))
        for turn in conversation.turns:
            pieces.append(("<|im_start|>user\n", False))
            picture = "<|vision_start|>" + "<|image_pad|>" * IMAGE_TOKENS + "<|vision_end|>"
            pieces += [(picture, False)] * len(turn.pictures)
            pieces += [(turn.question, False), ("<|im_end|>\n<|im_start|>assistant\n", False)]
            pieces += [(turn.answer, True), ("<|im_end|>", True), ("\n", False)]
        ids: list[int] = []
        answers: list[bool] = []
        for text, is_answer in pieces[:-1]:
            found = self.ids(text)
            ids += found
            answers += [is_answer] * len(found)
        return ids, answers

    def positions(self, ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """Time, row and column of each token, as Qwen3-VL counts them: a picture takes 3 steps, text one a token."""
        made: list[tuple[int, int, int]] = []
        position = place = 0
        for token in ids:
            if token == self.image_token_id:
                made.append((position, position + place // SIDE_TOKENS, position + place % SIDE_TOKENS))
                place += 1
                if place == IMAGE_TOKENS:
                    position, place = position + SIDE_TOKENS, 0
            else:
                made.append((position, position, position))
                position += 1
        return made


@dataclass(frozen=True)
class Batch:
    """What the model takes, for some conversations.

    Shapes: ids, labels (n, length) int64; positions (3, n, length) int64; patches (num_pictures * 36, 1536) float32.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    patches: torch.Tensor | None

    @property
    def grids(self) -> torch.Tensor | None:
        """(num_pictures, 3) int64: frames, rows and columns of patches."""
        import torch

        if self.patches is None:
            return None
        return torch.tensor([[1, GRID, GRID]]).repeat(len(self.patches) // GRID**2, 1)


def collate(encoder: Encoder, conversations: Sequence[Conversation]) -> Batch:
    """The conversations as one batch."""
    import numpy as np
    import torch

    encoded = [encoder.encode(conversation) for conversation in conversations]
    length = max(len(ids) for ids, _ in encoded)
    ids = torch.zeros(len(encoded), length, dtype=torch.long)
    labels = torch.full_like(ids, NO_LABEL)
    positions = torch.zeros(3, len(encoded), length, dtype=torch.long)
    for i, (row, answers) in enumerate(encoded):
        tokens = torch.tensor(row)
        ids[i, : len(row)] = tokens
        labels[i, : len(row)] = torch.where(torch.tensor(answers), tokens, NO_LABEL)
        positions[:, i, : len(row)] = torch.tensor(encoder.positions(row)).T
    pictures = [np.asarray(picture) for conversation in conversations for picture in conversation.pictures]
    pixels = torch.from_numpy(patches(np.stack(pictures))) if pictures else None
    return Batch(ids, labels, positions, pixels)
