# SPDX-License-Identifier: Apache-2.0
"""Marks requests whose images came with mm_hashes that the client has made, so that no features are kept under them.

`/inference/v1/generate` takes images as another server has processed them, with their hashes; whoever may ask it could
give any hash any pixels, and what is kept lives for days. The mark travels with the request, among the arguments of
its sampling parameters that are for nobody else. API server process; the engine looks.
"""

from typing import Any

from vllm_mmcache import rooms
from vllm_mmcache.arguments import argument

_MARK = "mmcache_names_of_client"


async def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ServingTokens.serve_tokens(request): one with processed images is marked, whatever the client says."""
    request = argument(wrapped, args, kwargs, "request")
    if rooms.is_on("features") and request.features is not None:
        params = request.sampling_params
        params.extra_args = {**(params.extra_args or {}), _MARK: True}
    return await wrapped(*args, **kwargs)


def are_in(request: Any) -> bool:
    """Whether an engine's request has images that a client has named."""
    params = request.sampling_params
    return params is not None and bool((params.extra_args or {}).get(_MARK))
