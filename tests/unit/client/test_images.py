# SPDX-License-Identifier: Apache-2.0
"""Names of images, and bodies with and without their bytes."""

import json
from typing import Any

import pybase64
import pytest

from tests.unit.components.image_extraction.test_extract import text_of
from vllm_mmcache.client.images import find_images
from vllm_mmcache.content.content_name import PREFIX, is_claim, is_readable, name_of


def part(text: str, kind: str = "png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{text}"}, **more}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "é?"}]}], **more}


def names(request: Any) -> list[Any]:
    return [part.get("uuid") for part in request["messages"][0]["content"]]


def encode(request: Any) -> bytes:
    return json.dumps(request).encode()


def test_bodies_are_the_request_with_names() -> None:
    a, b = text_of("a", 2000), text_of("b", 2000)
    quoted = {"type": "text", "text": part(a)["image_url"]["url"]}
    request = chat(part(a), quoted, part(b, detail="high"), part(a, "jpeg"), temperature=0.1, seed=2**70)
    images = find_images(encode(request))
    assert images
    assert len(set(images.ids)) == 2, "the file is named, whatever its URL calls it"
    assert all(one.startswith(PREFIX) and len(one) == len(PREFIX) + 64 for one in images.ids)
    expected = json.loads(json.dumps(request))
    content = expected["messages"][0]["content"]
    for place, one in zip((0, 2, 3), images.ids, strict=True):
        content[place]["uuid"] = one
    assert json.loads(images.body(())) == expected
    content[2]["image_url"] = None
    assert json.loads(images.body({images.ids[1]})) == expected
    for place in (0, 3):
        content[place]["image_url"] = None
    assert json.loads(images.body(set(images.ids))) == expected
    assert json.loads(images.body(())) != expected  # and the bytes come back
    assert quoted in json.loads(images.body(set(images.ids)))["messages"][0]["content"]


def test_the_same_image_twice_comes_with_its_bytes_twice() -> None:
    a = text_of("a", 2000)
    images = find_images(encode(chat(part(a), part(a))))
    assert images
    assert images.ids[0] == images.ids[1]
    assert images.body(()).count(a.encode()) == 2


def test_the_name_covers_all_of_the_file() -> None:
    """Negative control: one changed byte at the beginning, in the middle and at the end."""
    content = pybase64.b64decode(text_of("a", 5000))
    names = {name_of(content), name_of(content[:-1]), name_of(content + b"a")}
    for place in (0, 2500, len(content) - 1):
        names.add(name_of(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]))
    assert len(names) == 6
    images = find_images(encode(chat(part(text_of("a", 5000)))))
    assert images
    assert images.ids == [name_of(content)]


def test_what_is_no_base64_is_not_named() -> None:
    """The server says what is wrong with it; another image of the request is named all the same."""
    images = find_images(encode(chat(part("A" * 1999 + "=" * 5), part(text_of("a", 2000)))))
    assert images
    assert len(images.ids) == 1
    assert find_images(encode(chat(part("A" * 1999 + "=" * 5)))) is None


def test_names_of_other_versions_are_claims_too() -> None:
    assert [is_claim(name) for name in (name_of(b""), "mmc1-00", "mmc10-", "mmc-", "xmmc2-", "mmc")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert [is_readable(name) for name in (name_of(b""), "mmc1-00", "mmc20-")] == [True, False, False]


def test_escaped_slashes() -> None:
    a = text_of("a", 2000).replace("A", "/")
    images = find_images(encode(chat(part(a))).replace(b"/", b"\\/"))
    assert images
    sent = json.loads(images.body(()))
    assert sent["messages"][0]["content"][0]["image_url"] == part(a)["image_url"]


@pytest.mark.parametrize(
    "request_",
    [
        chat(part(text_of("a", 2000), uuid="mine")),
        chat(part(text_of("a", 2000), uuid=None)),
        chat({"type": "image_url", "image_url": {"url": "https://host/image.png"}}),
        chat({"type": "text", "text": part(text_of("a", 2000))["image_url"]["url"]}),
        chat({"type": "video_url", "image_url": part(text_of("a", 2000))["image_url"]}),
        chat(part("AAAA")),
        {"messages": part(text_of("a", 2000))},
        [part(text_of("a", 2000))],
    ],
)
def test_nothing_to_name(request_: Any) -> None:
    assert find_images(encode(request_)) is None


def test_not_json() -> None:
    assert find_images(encode(chat(part(text_of("a", 2000))))[:-1]) is None


def test_own_ids_stay_beside_named_images() -> None:
    a = text_of("a", 2000)
    images = find_images(encode(chat(part(a, uuid="mine"), part(a))))
    assert images
    mine, named = json.loads(images.body(set(images.ids)))["messages"][0]["content"][:2]
    assert mine == part(a, uuid="mine")
    assert named == {"type": "image_url", "image_url": None, "uuid": images.ids[0]}


def test_a_body_that_is_broken_in_a_text_that_is_left_out_stays_as_it_is() -> None:
    """Found by the fuzzer: of two equal keys the first is not sent, and with it went what the server would refuse."""
    a, b = json.dumps(part(text_of("a", 2000))), json.dumps(part(text_of("b", 2000)))
    body = f'{{"messages": [], "messages": [{{"content": [{a}]}}], "x": {b}, "x": 1}}'.encode()
    assert find_images(body) is not None
    broken = body.replace(text_of("b", 2000).encode(), text_of("b", 2000).encode() + b"\\x")
    assert find_images(broken) is None
