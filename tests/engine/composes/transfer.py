# SPDX-License-Identifier: Apache-2.0
"""A backend for vLLM's weight transfer that runs on the CPU; vLLM's own send through CUDA or NCCL.

It writes into parameters in place, past the model's load_weights: half of the first matrix of the vision tower, then
twice that, which is what it was to the last bit. So features of before are those of after, if the store looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "factors"


@dataclass
class Nothing:
    """What is told at the start."""


@dataclass
class Factor:
    """What a parameter is multiplied with."""

    factor: float


class Factors(WeightTransferEngine[Nothing, Factor]):
    """Multiplies the first matrix of the model's vision tower."""

    init_info_cls = Nothing
    update_info_cls = Factor

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: written in place."""

    def finish_weight_update(self) -> None:
        """Nothing to put together."""

    def shutdown(self) -> None:
        """Nothing to close."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's own, which then waits for an accelerator, and raises where there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Factor) -> None:
        named = [(name, one) for name, one in self.model.named_parameters() if "vis" in name and one.dim() > 1]
        named[0][1].data.mul_(update_info.factor)


def register() -> None:
    """Once in a process."""
    WeightTransferEngineFactory.register_engine(NAME, Factors)
