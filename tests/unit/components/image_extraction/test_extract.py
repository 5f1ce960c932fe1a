# SPDX-License-Identifier: Apache-2.0
"""Extraction: what the application gets, resolved again, is what the client sent; and only images are taken out."""

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sizes import scaled
from vllm_mmcache.components.image_extraction.extract import Extraction, extract
from vllm_mmcache.components.image_extraction.request_shapes import WALKERS, Lists
from vllm_mmcache.content import placeholders

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v2/embed", "/score", "/inference/v1/generate")


def text_of(name: str, num_bytes: int = 6200) -> str:
    """Base64 text that `name` chooses."""
    return base64.b64encode(hashlib.shake_256(name.encode()).digest(num_bytes)).decode()


def url_of(name: str, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{text_of(name)}"


def put_back(value: Any, extracted: Extraction) -> Any:
    """What the application got, with every reference resolved."""
    if isinstance(value, dict):
        return {put_back(key, extracted): put_back(one, extracted) for key, one in value.items()}
    if isinstance(value, list):
        return [put_back(one, extracted) for one in value]
    if isinstance(value, str):
        for name, payload in extracted.payloads.items():
            value = value.replace(name, bytes(payload.text).decode())
    return value


urls = st.builds(url_of, st.sampled_from("abc"), st.sampled_from(["png", "jpeg", "webp", "svg+xml"]))
odd_urls = st.one_of(
    st.sampled_from(["data:image/png;base64,", "data:image/png," + "A" * 9000, "data:image/png;base64," + "é" * 9000]),
    st.builds(lambda url: url + "!", urls),
    st.builds(lambda url: url + '"\\', urls),
    st.builds(lambda url: url[:-2] + "\n", urls),
    st.builds(lambda url: "see " + url, urls),
    st.builds(lambda url: f'"{url}"', urls),
    st.just(placeholders.PREFIX + "0" * 32 + "-0"),
    st.just(f"data:image/png;base64,{placeholders.new_stem()}0"),
    st.text(max_size=20),
)
any_text = st.one_of(urls, odd_urls, st.builds(text_of, st.sampled_from("abc")))
sources = st.fixed_dictionaries(
    {"type": st.sampled_from(["base64", "url"])},
    optional={"media_type": st.just("image/png"), "data": any_text, "url": any_text},
)
parts = st.one_of(
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": any_text})}),
    st.fixed_dictionaries({"type": st.just("image_url"), "url": any_text}),
    st.fixed_dictionaries({"type": st.just("input_image"), "image_url": any_text}),
    st.fixed_dictionaries({"type": st.just("text"), "text": any_text}, optional={"url": any_text}),
    st.fixed_dictionaries({"type": st.just("image"), "source": sources}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "content": st.lists(any_text, max_size=1)}),
    st.fixed_dictionaries({"type": st.just("input_audio"), "input_audio": st.fixed_dictionaries({"data": any_text})}),
    any_text,
    st.none(),
)
contents = st.one_of(any_text, st.lists(parts, max_size=4), st.none(), st.integers())
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": contents}, optional={"data": any_text, "url": any_text}
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.one_of(st.lists(st.one_of(messages, st.lists(messages, max_size=2)), max_size=3), any_text),
        "input": st.one_of(st.lists(messages, max_size=2), any_text),
        "images": st.lists(any_text, max_size=2),
        "data_1": st.one_of(any_text, messages, st.lists(messages, max_size=2)),
        "content_parts": st.lists(parts, max_size=3),
        "tools": st.lists(st.dictionaries(st.sampled_from(["url", "image_url", "data"]), any_text), max_size=2),
        "documents": st.lists(parts, max_size=2),
        "data": any_text,
    },
)


@pytest.mark.slow
@settings(max_examples=scaled(400), deadline=None)
@given(
    request=requests,
    path=st.sampled_from(PATHS),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    slashes=st.sampled_from(["/", "\\/", "\\u002f"]),
)
def test_the_application_gets_the_same_request(
    request: dict[str, Any], path: str, indent: int | None, ascii_only: bool, slashes: str
) -> None:
    body = json.dumps(request, indent=indent, ensure_ascii=ascii_only).replace("/", slashes).encode()
    extracted = extract(body, WALKERS[path])
    if extracted is not None:
        assert len(extracted.body) < len(body)
        assert put_back(json.loads(extracted.body), extracted) == json.loads(body) == request
        images = set(WALKERS[path](json.loads(body), Lists(1000)))
        for name, payload in extracted.payloads.items():
            assert json.loads(extracted.body) != request
            assert extracted.body.count(name.encode()) == 1
            assert any(image.endswith(bytes(payload.text).decode()) for image in images)


@pytest.mark.slow
@settings(max_examples=scaled(300), deadline=None)
@given(body=st.binary(max_size=200), at=st.integers(0, 5000), request=requests)
def test_broken_bodies(body: bytes, at: int, request: dict[str, Any]) -> None:
    """Bytes thrown into a request: either nothing is extracted, or both are the same request."""
    whole = json.dumps(request).encode()
    broken = whole[:at] + body + whole[at:]
    extracted = extract(broken, WALKERS["/v1/chat/completions"])
    if extracted is not None:
        assert put_back(json.loads(extracted.body), extracted) == json.loads(broken)


@pytest.mark.parametrize("byte", [b"\0", b"\n", b"\\u12", b"\xff"])
def test_a_body_that_is_broken_where_it_was_cut_stays_as_it_is(byte: bytes) -> None:
    """Found by `make soak`: a text that is no image was put back with its broken byte, and another was extracted."""
    whole = json.dumps(chat(image("a"), {"type": "text", "text": url_of("b")})).encode()
    assert extract(whole, WALKERS["/v1/chat/completions"]) is not None
    at = whole.index(text_of("b").encode()) + 700
    broken = whole[:at] + byte + whole[at:]
    with pytest.raises(ValueError, match=r"Invalid|decode"):
        json.loads(broken)
    assert extract(broken, WALKERS["/v1/chat/completions"]) is None


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(name)}}


TOOL_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text_of("a")}}


@pytest.mark.parametrize(
    ("path", "request_", "num"),
    [
        ("/v1/chat/completions", chat(image("a"), image("b")), 2),
        ("/v1/chat/completions", chat(image("a"), image("a")), 2),
        ("/v1/chat/completions", chat({"image_url": url_of("a")}), 1),
        ("/v1/chat/completions", chat({"type": "text", "text": url_of("a")}), 0),
        ("/v1/chat/completions", chat({"type": "text", "text": f'say "{url_of("a")}"'}), 0),
        ("/v1/chat/completions", chat({"type": "video_url", "video_url": {"url": url_of("a")}}), 0),
        ("/v1/chat/completions", chat(tools=[{"image_url": {"url": url_of("a")}}]), 0),
        ("/v1/chat/completions", chat(documents=[image("a")]), 0),
        ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": url_of("a"), "u": url_of("b")}}), 1),
        ("/v1/chat/completions/batch", {"messages": [chat(image("a"))["messages"], chat(image("b"))["messages"]]}, 2),
        ("/tokenize", chat(image("a")), 1),
        ("/v1/embeddings", chat(image("a")), 1),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url_of("a")}]}]},
            1,
        ),
        (
            "/v1/responses",
            {
                "enable_response_messages": True,
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url_of("a")}]}],
            },
            0,
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"type": "function_call_output", "output": [{"type": "input_image", "image_url": url_of("a")}]}
                ]
            },
            1,
        ),
        ("/v1/messages", chat(TOOL_IMAGE), 1),
        ("/v1/messages", chat({"type": "tool_result", "content": [TOOL_IMAGE]}), 1),
        (
            "/v1/messages",
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "content": [TOOL_IMAGE]}]}]},
            0,
        ),
        ("/v1/messages", chat({"type": "redacted_thinking", "data": text_of("a")}), 0),
        ("/v2/embed", {"images": [url_of("a")], "inputs": [{"content": [image("b")]}]}, 2),
        ("/v1/systemone", {"images": [url_of("a")], "audio": [url_of("b")], "state": {"data": text_of("a")}}, 1),
        ("/score", {"data_1": "text", "data_2": [{"content": [image("a")]}]}, 1),
        ("/inference/v1/generate", {"content_parts": [{"type": "image_url", "url": url_of("a")}]}, 1),
    ],
)
def test_places(path: str, request_: dict[str, Any], num: int) -> None:
    body = json.dumps(request_).encode()
    extracted = extract(body, WALKERS[path])
    assert (len(extracted.payloads) if extracted else 0) == num
    if extracted:
        assert put_back(json.loads(extracted.body), extracted) == request_


@pytest.mark.parametrize("slash", ["\\/", "\\u002f", "\\u002F"])
def test_escaped_slashes(slash: str) -> None:
    """PHP writes every slash with a backslash: head and text."""
    body = json.dumps(chat(image("a"))).replace("/", slash).encode()
    assert "/" in text_of("a")
    extracted = extract(body, WALKERS["/v1/chat/completions"])
    assert extracted is not None
    assert [payload.text for payload in extracted.payloads.values()] == [text_of("a").encode()]


def test_text_stays_byte_for_byte() -> None:
    """Beside an image that is extracted, what is not an image is the very bytes that came."""
    text = {"type": "text", "text": url_of("b") + "  ü \u2028"}
    body = json.dumps(chat(text, image("a")), indent=3, ensure_ascii=False).encode()
    extracted = extract(body, WALKERS["/v1/chat/completions"])
    assert extracted is not None
    (name,) = extracted.payloads
    assert extracted.body.replace(name.encode(), text_of("a").encode()) == body


def test_the_last_of_two_equal_keys_counts() -> None:
    url = json.dumps({"url": url_of("a")})[:-1] + f', "url": "{url_of("b")}"}}'
    body = f'{{"messages": [{{"content": [{{"type": "image_url", "image_url": {url}}}]}}]}}'.encode()
    extracted = extract(body, WALKERS["/v1/chat/completions"])
    assert extracted is not None
    assert [bytes(payload.text) for payload in extracted.payloads.values()] == [text_of("b").encode()]
    assert put_back(json.loads(extracted.body), extracted) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        json.dumps([chat(image("a"))]).encode(),
        json.dumps(chat(image("a"))).encode()[:-1],
        json.dumps(chat(image("a"))).encode("utf-16"),
        json.dumps(chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}})).encode(),
        json.dumps(chat(image("a"))).encode().replace(b"base64,", b"base64,\x01"),
        b"--x\r\ncontent-disposition: form-data\r\n\r\n" + url_of("a").encode(),
    ],
)
def test_left_alone(body: bytes) -> None:
    assert extract(body, WALKERS["/v1/chat/completions"]) is None


def test_names_are_new_for_each_request() -> None:
    body = json.dumps(chat(image("a"))).encode()
    names = {name for _ in range(20) for name in extract(body, WALKERS["/v1/chat/completions"]).payloads}  # type: ignore[union-attr]
    assert len(names) == 20
    assert not placeholders.size().entries


def test_same_text_is_the_same_content_and_a_changed_byte_is_not() -> None:
    body = json.dumps(chat(image("a"), image("a"), image("b"))).encode()
    extracted = extract(body, WALKERS["/v1/chat/completions"])
    assert extracted is not None
    one, same, other = extracted.payloads.values()
    assert one.content_id == same.content_id != other.content_id
    assert one.decode() == base64.b64decode(text_of("a"))


def test_many_escapes_are_left() -> None:
    """Each costs a step; a text with few of them, which is base64 of anything but white, is extracted."""
    for text, extracted in (("AAA\\/" * 4000, False), ("A" * 63 + "\\/", True)):
        body = json.dumps(chat({"image_url": "HERE"})).replace("HERE", f"data:image/png;base64,{text * 200}").encode()
        assert (extract(body, WALKERS["/v1/chat/completions"]) is not None) == extracted


def test_a_small_image_in_a_large_body_is_left() -> None:
    """The rest is parsed twice where anything is extracted: that must save more than it takes."""
    for num_words, extracted in ((2000, True), (20_000, False)):
        body = json.dumps(chat(image("a"), {"type": "text", "text": "word " * num_words})).encode()
        assert (extract(body, WALKERS["/v1/chat/completions"]) is not None) == extracted


def test_long_lists_are_not_looked_at() -> None:
    for num_parts, extracted in ((200, True), (300, False)):
        body = json.dumps(chat(image("a"), *[{}] * num_parts)).encode()
        assert (extract(body, WALKERS["/v1/chat/completions"]) is not None) == extracted
