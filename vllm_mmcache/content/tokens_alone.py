# SPDX-License-Identifier: Apache-2.0
"""Whether a request wants the tokens of its prompt and the ids of its images, and nothing of the images' pixels.

So does a router that asks for both before it chooses a replica (`/render` with `mm_payload: none`). API server
process, event loop.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

PATHS = ("/v1/chat/completions/render", "/v1/responses/render", "/v1/messages/render")
"""Whose requests have a field for it; that of Cohere's chat has none, and is always answered with pixels."""
ASKED: ContextVar[bool] = ContextVar("mmcache_tokens_alone", default=False)
"""Whether the HTTP request that is being worked on is such a one."""


def is_asked(path: str, body: Any) -> bool:
    """Whether a request is such a one, by its path and its parsed body.

    Where the body does not say it in vLLM's own words, such as a value that pydantic would make one of them, it is not.
    """
    if not path.endswith(PATHS) or not isinstance(body, Mapping):
        return False
    payload = body.get("mm_payload", "none" if body.get("return_mm_kwargs") is False else None)
    return bool(payload == "none")
