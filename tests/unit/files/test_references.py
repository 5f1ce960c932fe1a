# SPDX-License-Identifier: Apache-2.0
"""Where files are named in requests, and what then stands there."""

import json
from typing import Any

import pytest

from vllm_mmcache.files.references import references

URL = "data:image/png;base64,CONTENT"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "CONTENT"}}
NAMED = {"type": "image", "source": {"type": "file", "file_id": "a"}}
TEXT = {"type": "text", "text": "What is this?"}
CHAT = {"type": "file", "file": {"file_id": "a"}}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": URL}}
PARTS = {
    "chat": (CHAT, CHAT_IMAGE),
    "chat with a uuid": ({**CHAT, "uuid": "x"}, {**CHAT_IMAGE, "uuid": "x"}),
    "responses": ({"type": "input_image", "file_id": "a"}, {"type": "input_image", "image_url": URL, "detail": "auto"}),
    "responses, as a file": (
        {"type": "input_file", "file_id": "a", "detail": "low"},
        {"type": "input_image", "image_url": URL, "detail": "low"},
    ),
    "anthropic": (NAMED, IMAGE),
    "anthropic, of a tool": (
        {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, NAMED]},
        {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, IMAGE]},
    ),
}


def replaced(request: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    changed = json.loads(json.dumps(request))
    found = list(references(changed))
    for reference in found:
        reference.put("image/png", "CONTENT")
    return [reference.file_id for reference in found], changed


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("key", ["messages", "input"])
def test_parts(case: str, key: str) -> None:
    part, image = PARTS[case]
    message = {"role": "user", "content": [TEXT, part]}
    ids, changed = replaced({"model": "m", key: [message, {"role": "assistant", "content": "no parts"}]})
    assert ids == ["a"]
    assert changed[key][0]["content"] == [TEXT, image]


def test_a_batch_and_a_tools_output() -> None:
    ids, changed = replaced(
        {"messages": [[{"role": "user", "content": [CHAT]}], [{"role": "user", "content": [CHAT]}]]}
    )
    assert ids == ["a", "a"]
    assert [talk[0]["content"] for talk in changed["messages"]] == [[CHAT_IMAGE], [CHAT_IMAGE]]
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "file_id": "a"}]}
    ids, changed = replaced({"input": [output]})
    assert ids == ["a"]
    assert changed["input"][0]["output"][0]["image_url"] == URL


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"messages": "a", "input": "file_id"},
        {"messages": [None, 1, {"content": None}, {"content": [None, 1, "file_id"]}]},
        {"messages": [{"content": [{"type": "file", "file": {"file_data": "b64"}}]}]},
        {"messages": [{"content": [{"type": "file", "file": {"file_id": 1}}]}]},
        {"messages": [{"content": [{"type": "text", "text": "file_id", "file": {"file_id": "a"}}]}]},
        {"messages": [{"content": [{"type": "image", "source": {"type": "base64", "file_id": "a"}}]}]},
        {"tools": [{"type": "file", "file": {"file_id": "a"}}], "file_id": "a"},
        {"input": [{"type": "message", "output": [{"type": "input_image", "file_id": "a"}]}]},
    ],
)
def test_all_else_stays(request_: dict[str, Any]) -> None:
    assert replaced(request_) == ([], request_)


def test_the_result_of_a_tool_that_the_model_itself_names_is_text() -> None:
    """vLLM makes text of it, in which the name of an image would be another one each time."""
    part, _ = PARTS["anthropic, of a tool"]
    request = {"messages": [{"role": "assistant", "content": [part]}]}
    assert list(references(request)) == []
