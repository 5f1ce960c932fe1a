# SPDX-License-Identifier: Apache-2.0
"""Texts and images of a request, whichever protocol it is of."""

import base64
import io
from dataclasses import replace
from typing import Any

import pytest
from PIL import ExifTags, Image

from tests.unit.traffic.logs import chat, image, png, text, user
from vllm_mmcache.traffic.requests import UNKNOWN, NoPrompt, Other, Picture, Words, picture_of, prompt_of

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
def test_a_broken_picture_is_unknown(broken: str) -> None:
    assert picture_of(broken, is_base64=True) == UNKNOWN


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "JPEG"])
def test_a_broken_exif_is_no_reason_to_end(file_format: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 20)).save(file, file_format, exif=b"Exif\0\0II*\0")
    assert picture_of(base64.b64encode(file.getvalue()).decode(), is_base64=True).width in (0, 40)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,[REDACTED]"}},
        {"type": "image_url", "image_url": {"url": "<image removed>"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(1)[:50]}... (truncated)"}},
        {"type": "image", "source": {"type": "base64", "data": "..."}},
        {"type": "input_image"},
    ],
)
def test_an_image_that_was_taken_out_is_unknown(part: dict[str, Any]) -> None:
    (_, found) = prompt_of(chat(user(part))).turns[0]
    assert found == UNKNOWN


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "source_type": "base64", "data": png(1), "mime_type": "image/png"},
        {"type": "image", "data": png(1), "mimeType": "image/png"},
        {"type": "image_url", "image_url": {"url": png(1)}},
        {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{png(1)}"},
    ],
)
def test_other_forms_of_an_image(part: dict[str, Any]) -> None:
    (_, found) = prompt_of(chat(user(part))).turns[0]
    assert found == picture_of(png(1), is_base64=True)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "file", "file": {"file_id": "file-1"}}, "file-1"),
        ({"type": "input_image", "file_id": "file-1"}, "file-1"),
        ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, "file-1"),
        ({"type": "image", "source_type": "url", "url": "https://host/a.png"}, "https://host/a.png"),
        ({"type": "image_url", "image_url": {"url": "sha256:12ab"}}, "sha256:12ab"),
    ],
)
def test_images_that_have_a_name(part: dict[str, Any], name: str) -> None:
    (_, found) = prompt_of(chat(user(part))).turns[0]
    assert found == picture_of(name)
    assert found != UNKNOWN


def test_a_uuid_goes_with_its_image() -> None:
    with_image, alone = ({**part, "uuid": "u"} for part in (image(1), {"type": "image_url", "image_url": None}))
    (_, first, second) = prompt_of(chat(user(with_image, alone))).turns[0]
    assert first == replace(picture_of(png(1), is_base64=True), uuid="u")
    assert second == replace(UNKNOWN, uuid="u", is_sent=False)


def test_what_a_computer_shows() -> None:
    shown = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{png(1)}"}
    (turn,) = prompt_of({"input": [{"type": "computer_call_output", "call_id": "1", "output": shown}]}).turns
    assert turn[1:] == (picture_of(png(1), is_base64=True),)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "A" * 1000, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + "A" * 1000}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "A" * 1000}},
        {"type": "input_file", "file_data": "A" * 1000},
        {"type": "file", "file": {"file_data": "A" * 1000}},
    ],
)
def test_other_media_are_no_text(part: dict[str, Any]) -> None:
    (_, found, same, other) = prompt_of(chat(user(part, dict(part), {**part, "more": 1}))).turns[0]
    assert isinstance(found, Other)
    assert found == same != other


def test_a_document_of_text_is_text() -> None:
    part = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Some words"}}
    (_, found) = prompt_of(chat(user(part))).turns[0]
    assert isinstance(found, Words)
    assert "Some words" in found.text


@pytest.mark.parametrize("more", [{"previous_response_id": "resp_1"}, {"conversation": "conv_1"}])
def test_a_request_that_goes_on_with_what_the_server_keeps(more: dict[str, Any]) -> None:
    assert prompt_of({"input": "And then?", **more}).is_continued
    assert not prompt_of({"input": "And then?", **dict.fromkeys(more)}).is_continued


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
        ({"prompt": ["x", "y"]}, "none of 'messages'"),
        ({"conversations": [{"from": "human", "value": "vLLM leaves out an entry without an answer"}]}, "none of"),
        ({"messages": []}, "none of 'messages'"),
        ({"messages": ["x"]}, "a message that is no JSON object"),
    ],
)
def test_no_request(body: object, why: str) -> None:
    with pytest.raises(NoPrompt, match=why):
        prompt_of(body)


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ({"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A cat."}]}, []),
        (
            {"conversations": [{"value": "What?"}, {"value": "A cat."}, {"value": "Sure?"}], "image": "a b/cat.png"},
            ["file://a%20b/cat.png"],
        ),
        ({"prompt": "What?", "output_tokens": 10}, []),
        ({"prompt": "What?", "image_files": ["/1.png", "https://x/2"]}, ["file:///1.png", "https://x/2"]),
    ],
    ids=["ShareGPT", "ShareGPT with an image", "custom", "custom_mm"],
)
def test_datasets_of_vllm_bench(entry: dict[str, Any], names: list[str]) -> None:
    """It asks the first turn, and puts images behind the text."""
    ((role, words, *pictures),) = prompt_of(entry).turns
    assert (role, words) == (Words("user"), Words("What?"))
    assert pictures == [picture_of(name) for name in names]
    assert all(isinstance(one, Picture) and one.digest for one in pictures)
