# SPDX-License-Identifier: Apache-2.0
"""Texts and images of a request, whichever protocol it is of."""

import base64
import io
from typing import Any

import pytest
from PIL import ExifTags, Image

from tests.unit.traffic.logs import chat, image, png, text, user
from vllm_mmcache.traffic.requests import NoPrompt, Picture, Words, picture_of, prompt_of

ANTHROPIC = {
    "system": "Be brief.",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png(1)}},
                {"type": "tool_result", "content": [{"type": "text", "text": "What is it?"}]},
            ],
        }
    ],
}
RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": f"data:image/png;base64,{png(1)}"},
                {"type": "input_text", "text": "What is it?"},
            ],
        }
    ],
}
CHAT = chat({"role": "system", "content": "Be brief."}, user(image(1), text("What is it?")))


@pytest.mark.parametrize("body", [CHAT, ANTHROPIC, RESPONSES], ids=["chat", "anthropic", "responses"])
def test_protocols_say_the_same(body: dict[str, Any]) -> None:
    system, asked = prompt_of(body).turns
    assert system == (Words("system"), Words("Be brief."))
    role, picture, words = asked
    assert (role, words) == (Words("user"), Words("What is it?"))
    assert isinstance(picture, Picture)
    assert (picture.width, picture.height, picture.format) == (64, 32, "PNG")
    assert picture.num_bytes == len(base64.b64decode(png(1)))
    assert picture == picture_of(png(1), is_base64=True)
    assert picture.digest != picture_of(png(2), is_base64=True).digest


def test_a_picture_that_was_turned_over() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (40, 20)).save(file, "JPEG", exif=exif)
    picture = picture_of(base64.b64encode(file.getvalue()).decode(), is_base64=True)
    assert (picture.width, picture.height) == (20, 40)


@pytest.mark.parametrize("broken", [png(3)[:40], "not base64!", "", "AAAA"])
def test_a_broken_picture_has_no_size(broken: str) -> None:
    picture = picture_of(broken, is_base64=True)
    assert (picture.width, picture.height) == (0, 0)
    assert picture == picture_of(broken, is_base64=True)


def test_a_picture_behind_a_url_is_known_by_it() -> None:
    one, again, other = (picture_of(f"https://host/{name}.png") for name in "aab")
    assert one == again != other
    assert (one.width, one.num_bytes) == (0, 0)


def test_tools_and_their_calls_are_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "click"}}]}
    system, _, called = prompt_of(chat(user(text("Go.")), call, tools=[{"name": "click"}])).turns
    assert "click" in str(system)
    assert "click" in str(called)


def test_a_tenant_is_the_salt() -> None:
    assert prompt_of(chat(user(text("a")), cache_salt="acme")).tenant == "acme"
    assert prompt_of(chat(user(text("a")), cache_salt=7)).tenant == ""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([], "no JSON object"),
        (None, "no JSON object"),
        ({"prompt": "x"}, "neither"),
        ({"messages": []}, "neither"),
        ({"messages": ["x"]}, "a message that is no JSON object"),
    ],
)
def test_no_request(body: object, why: str) -> None:
    with pytest.raises(NoPrompt, match=why):
        prompt_of(body)
