# SPDX-License-Identifier: Apache-2.0
"""The encoder-cache connector that vLLM's model runner V2 asks around each step's encoding. Worker process."""

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm.v1.worker.gpu.ec_connector import ECConnector

from vllm_mmcache.components.features.message import Message
from vllm_mmcache.components.features.worker.rank import Outputs, RankFeatures


class Connector(ECConnector):  # type: ignore[misc]
    """A rank's features as runner V2's encoder-cache connector, which vLLM asks around each step's encoding."""

    def __init__(self, rank: RankFeatures, outputs: Outputs) -> None:
        self._rank = rank
        self._outputs = outputs

    @contextlib.contextmanager
    def maybe_get_output(self, scheduler_output: Any) -> Iterator[None]:
        """Around a step's encoding, as in vLLM's; what the step's output says of the transfer is always None."""
        with self._rank.encoding(message_of(scheduler_output), self._outputs):
            yield None


def message_of(scheduler_output: Any) -> Message | None:
    """What the engine's connector says of this step; None where it says nothing."""
    found = scheduler_output.ec_connector_metadata
    return found if isinstance(found, Message) else None
