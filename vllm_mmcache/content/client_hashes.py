# SPDX-License-Identifier: Apache-2.0
"""Marks requests whose images came with mm_hashes that the client has made, so that no features are kept under them.

`/inference/v1/generate` takes images as another server has processed them, with their hashes; whoever may ask it could
give any hash any pixels, and what is kept lives for days. The mark travels with the request, among the arguments of
its sampling parameters that are for nobody else. API server process; the engine looks.
"""

from contextvars import ContextVar
from typing import Any

GIVEN: ContextVar[bool] = ContextVar("mmcache_client_hashes", default=False)
"""Whether the body of the HTTP request that is being worked on brings processed images (its field `features`)."""

_MARK = "mmcache_client_hashes"


def mark(request: Any) -> None:
    """Mark an engine's request if its images were processed by the client, and only then, whatever the client says."""
    params = request.sampling_params
    if params is not None and (GIVEN.get() or _MARK in (params.extra_args or {})):
        params.extra_args = {**(params.extra_args or {}), _MARK: GIVEN.get()}


def are_in(request: Any) -> bool:
    """Whether an engine's request has images that a client has named."""
    params = request.sampling_params
    return params is not None and bool((params.extra_args or {}).get(_MARK))
