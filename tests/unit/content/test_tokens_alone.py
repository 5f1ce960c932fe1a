# SPDX-License-Identifier: Apache-2.0
"""Which requests want tokens alone: as vLLM's own models read the body."""

from typing import Any

import pytest

from vllm_mmcache.content import tokens_alone

CHAT = "/v1/chat/completions/render"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"mm_payload": "none"}, True),
        (CHAT, {"return_mm_kwargs": False}, True),
        ("/v1/messages/render", {"mm_payload": "none"}, True),
        ("/prefix/v1/responses/render", {"mm_payload": "none"}, True),
        (CHAT, {"mm_payload": "tensors", "return_mm_kwargs": False}, False),
        (CHAT, {"mm_payload": "none", "return_mm_kwargs": True}, True),
        (CHAT, {"mm_payload": "tensors"}, False),
        (CHAT, {"return_mm_kwargs": "false"}, False),
        (CHAT, {"mm_payload": None}, False),
        (CHAT, {"mm_payload": ["none"]}, False),
        (CHAT, {}, False),
        (CHAT, ["mm_payload"], False),
        (CHAT, None, False),
        ("/v1/chat/completions", {"mm_payload": "none"}, False),
        ("/cohere/v2/chat/render", {"mm_payload": "none"}, False),
        ("/v1/completions/render", {"mm_payload": "none"}, False),
    ],
)
def test_is_asked(path: str, body: Any, expected: bool) -> None:
    assert tokens_alone.is_asked(path, body) is expected
