# SPDX-License-Identifier: Apache-2.0
"""Whether the engine knows who has named a request's images, whatever the client says."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm import PoolingParams, SamplingParams

from vllm_mmcache.content import image_namer


def request_of(kind: str, said: dict[str, Any] | None = None, num_images: int = 1) -> Any:
    sampling = SamplingParams(extra_args=said) if kind == "sampling" else None
    pooling = PoolingParams(extra_kwargs=said) if kind == "pooling" else None
    return SimpleNamespace(sampling_params=sampling, pooling_params=pooling, mm_features=[object()] * num_images)


def as_sent(request: Any) -> Any:
    """As it comes to an engine in another process."""
    sampling, pooling = request.sampling_params, request.pooling_params
    send = msgspec.msgpack.encode
    if sampling is not None:
        sampling = msgspec.msgpack.decode(send(sampling), type=SamplingParams)
    if pooling is not None:
        pooling = msgspec.msgpack.decode(send(pooling), type=PoolingParams)
    return SimpleNamespace(sampling_params=sampling, pooling_params=pooling, mm_features=request.mm_features)


@pytest.mark.parametrize("kind", ["sampling", "pooling"])
@pytest.mark.parametrize("said", [None, {image_namer._MARK: "identity", "other": 1}, {image_namer._MARK: False}])
def test_a_client_cannot_say_who_has_named_its_images(kind: str, said: dict[str, Any] | None) -> None:
    """The mark is among arguments where a client can write, too, in JSON."""
    for is_named in (True, False):
        request = request_of(kind, json.loads(json.dumps(said)))
        assert image_namer.of(as_sent(request)) is None, "as a server without identity leaves it"
        before = image_namer.PROCESSED_BY_CLIENT.set(is_named)
        try:
            image_namer.mark(request, None)
        finally:
            image_namer.PROCESSED_BY_CLIENT.reset(before)
        came = as_sent(request)
        assert (image_namer.is_client(came), image_namer.is_identity(came)) == (is_named, not is_named)
        if said is not None:
            params = came.sampling_params or came.pooling_params
            assert (params.extra_args if kind == "sampling" else params.extra_kwargs).get("other") == said.get("other")


def test_a_renderer_that_goes_past_identity() -> None:
    class Processor:
        """An engine's, of outputs."""

    request, past, other = request_of("sampling"), Processor(), Processor()
    image_namer.may_bypass_identity(past)
    image_namer.mark(request, past)
    assert image_namer.of(request) == image_namer.UNKNOWN
    image_namer.mark(request, other)
    assert image_namer.is_identity(request), "of another engine in this process"


def test_a_request_without_images_stays_as_it_is() -> None:
    request = request_of("sampling", num_images=0)
    image_namer.mark(request, None)
    assert request.sampling_params.extra_args is None


def test_the_namer_of_another_request() -> None:
    one, other, third = (request_of("sampling") for _ in range(3))
    image_namer.mark(one, None)
    image_namer.set_namer(image_namer.of(one), other)
    image_namer.set_namer(image_namer.of(third), third)
    assert image_namer.is_identity(other)
    assert image_namer.of(third) is None
