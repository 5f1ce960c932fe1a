# SPDX-License-Identifier: Apache-2.0
"""The encoder-cache connector that vLLM's model runner V2 asks around each step's encoding. Worker process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.v1.worker.gpu.ec_connector import ECConnector

from vllm_mmcache.components.features.message import Message
from vllm_mmcache.components.features.worker.rank import RankFeatures


class Connector(ECConnector):  # type: ignore[misc]
    """A rank's features as runner V2's encoder-cache connector, which vLLM asks around each step's encoding.

    replaced: the one that the runner had, for when the store is closed.
    """

    def __init__(self, rank: RankFeatures, encoder_cache: Any, replaced: ECConnector) -> None:
        self._rank = rank
        self._cache = encoder_cache
        self.replaced = replaced

    @contextlib.contextmanager
    def maybe_get_output(self, scheduler_output: Any) -> Iterator[None]:
        """Around a step's encoding, as in vLLM's; what the step's output says of the transfer is always None."""
        message = message_of(scheduler_output)
        put_pixels(message, scheduler_output, lambda request_id: self._cache.mm_features[request_id])
        with self._rank.encoding(message, self._cache.encoder_outputs):
            yield None


def put_pixels(message: Message | None, scheduler_output: Any, features_of: Callable[[str], Sequence[Any]]) -> None:
    """Give images that are to be encoded in this step the pixels that came with it.

    features_of: what the model runner has of a request's images, which it has got without these pixels.
    """
    if message is None or not message.pixels:
        return
    for request_id, images in scheduler_output.scheduled_encoder_inputs.items():
        features = features_of(request_id)
        for index in images:
            if (item := message.pixels.get(features[index].identifier)) is not None:
                features[index].data = item


def message_of(scheduler_output: Any) -> Message | None:
    """What the engine's connector says of this step; None where it says nothing."""
    found = scheduler_output.ec_connector_metadata
    return found if isinstance(found, Message) else None
