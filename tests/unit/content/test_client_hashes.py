# SPDX-License-Identifier: Apache-2.0
"""Whether images that a client has named are known for it in the engine, whatever the client says."""

from types import SimpleNamespace

from vllm import SamplingParams

from vllm_mmcache.content import client_hashes


def test_a_client_cannot_take_away_the_mark_of_images_that_it_has_named() -> None:
    """The mark is among the arguments of sampling parameters that are for nobody else, where a client can write too."""
    for said in ({}, {client_hashes._MARK: False}, {client_hashes._MARK: True, "other": 1}):
        for is_named in (True, False):
            request = SimpleNamespace(sampling_params=SamplingParams(extra_args=dict(said)))
            before = client_hashes.GIVEN.set(is_named)
            try:
                client_hashes.mark(request)
            finally:
                client_hashes.GIVEN.reset(before)
            assert client_hashes.are_in(request) == is_named
            assert request.sampling_params.extra_args.get("other") == said.get("other")
