# SPDX-License-Identifier: Apache-2.0
"""A real server, stock and with the plugin, asked the same: same answers, same errors, and no image decoded twice.

The servers are conftest.py's. Everything the clients see is compared, but for times and random ids.
"""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import io
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import OpenAI

from tests.support import files
from tests.unit.components.image_extraction.test_extract import text_of
from vllm_mmcache.exactness.pictures import ellipses

if TYPE_CHECKING:
    from tests.system.image_extraction.conftest import Said

pytestmark = pytest.mark.engine

MODEL = "zoo"


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def picture(name: str) -> str:
    return encoded(files.saved(ellipses(name, (160, 120)), "PNG", compress_level=0))


def image_url(text: str, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{text}"}}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }


def good_requests() -> dict[str, tuple[str, Any]]:
    """Name -> (path, request), each of which is answered; those that come twice are warm the second time."""
    a, b = picture("a"), picture("b")
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": a}}
    talk = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    input_image = {"type": "input_image", "detail": "auto", "image_url": image_url(a)["image_url"]["url"]}
    requests: dict[str, tuple[str, Any]] = {
        "chat": ("/v1/chat/completions", chat(image_url(a), image_url(b), logprobs=True)),
        "chat again": ("/v1/chat/completions", chat(image_url(a), image_url(b), logprobs=True)),
        "chat twice the same": ("/v1/chat/completions", chat(image_url(a), image_url(a), logprobs=True)),
        "chat stream": ("/v1/chat/completions", chat(image_url(a), image_url(b), stream=True)),
        "chat with an image in its text": (
            "/v1/chat/completions",
            chat(
                image_url(a), {"type": "text", "text": image_url(text_of("t", 1000))["image_url"]["url"]}, logprobs=True
            ),
        ),
        "chat with a name of ours in its text": (
            "/v1/chat/completions",
            chat(image_url(a), {"type": "text", "text": "mmcache-0123456789abcdef-0-0"}),
        ),
        "chat with uuid": ("/v1/chat/completions", chat({**image_url(a), "uuid": "mine"})),
        "chat with processor arguments": (
            "/v1/chat/completions",
            chat(image_url(a), mm_processor_kwargs={"max_pixels": 64 * 64}, logprobs=True),
        ),
        "chat batch": ("/v1/chat/completions/batch", {**talk, "messages": [chat(image_url(a))["messages"]] * 2}),
        "render": ("/v1/chat/completions/render", chat(image_url(a))),
        "responses": (
            "/v1/responses",
            {
                "model": MODEL,
                "max_output_tokens": 4,
                "temperature": 0,
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "And this?"}, input_image]}],
            },
        ),
        "messages": (
            "/v1/messages",
            {**talk, "messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, block]}]},
        ),
        "messages with a tool's image": (
            "/v1/messages",
            {
                **talk,
                "messages": [
                    {"role": "user", "content": "Look."},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]},
                ],
            },
        ),
        "count tokens": (
            "/v1/messages/count_tokens",
            {"model": MODEL, "messages": [{"role": "user", "content": [block]}]},
        ),
        "tokenize": (
            "/tokenize",
            {key: value for key, value in chat(image_url(a)).items() if key in ("model", "messages")},
        ),
    }
    for name, content in files.good().items():
        padded = encoded(content) if len(content) > 6400 else encoded(content + b"\0" * 6400)
        requests[f"kind of file: {name}"] = ("/v1/chat/completions", chat(image_url(padded), logprobs=True))
    return requests


def bad_requests() -> dict[str, tuple[str, Any]]:
    """Name -> (path, request or raw body), each of which is refused."""
    a = picture("a")
    good = json.dumps(chat(image_url(a)))
    url = image_url(a)["image_url"]["url"]
    path = "/v1/chat/completions"
    requests: dict[str, tuple[str, Any]] = {
        "not base64": (path, chat(image_url(a[:-8] + "!!!!" + a[-4:]))),
        "base64 cut": (path, chat(image_url(a[:-3]))),
        "no comma": (path, chat({"type": "image_url", "image_url": {"url": "data:image/png;base64" + a}})),
        "not in base64": (path, chat({"type": "image_url", "image_url": {"url": "data:image/png," + a}})),
        "unsupported scheme": (path, chat({"type": "image_url", "image_url": {"url": "ftp://host/image.png"}})),
        "a name of ours": (path, chat(image_url("mmcache-0123456789abcdef-" + "0" * 32 + "-0"))),
        "too many images": (path, chat(*[image_url(a)] * 5)),
        "too many images, one unknown": (path, chat(*[image_url(a)] * 4, image_url(picture("never seen")))),
        "empty body": (path, b""),
        "invalid json": (path, good[:-1].encode()),
        "invalid json after an image": (path, good.replace('"max_tokens"', "max_tokens").encode()),
        "control character in the text": (path, good.replace(a, a[:2000] + "\n" + a[2000:]).encode()),
        "wrong field beside an image": (path, chat(image_url(a), max_tokens="many", temperature=-3)),
        "part of no known type": (path, chat({"type": "picture", "image_url": {"url": url}})),
        "url of a wrong type": (path, chat({"type": "image_url", "image_url": [url, url]})),
        "url where an object belongs": (path, chat({"type": "image_url", "image_url": url})),
        "role missing": (path, {"model": MODEL, "messages": [{"content": [image_url(a)]}]}),
        "content is the part": (path, {"model": MODEL, "messages": [{"role": "user", "content": image_url(a)}]}),
        "no such model": (path, chat(image_url(a)) | {"model": "other"}),
        "prompt too long": (path, chat(image_url(a), {"type": "text", "text": "word " * 20_000})),
        "responses: wrong part": (
            "/v1/responses",
            {"model": MODEL, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": [url]}]}]},
        ),
        "messages: no max_tokens": (
            "/v1/messages",
            {
                "model": MODEL,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": a}}
                        ],
                    }
                ],
            },
        ),
        "tokenize: wrong field": ("/tokenize", {"model": MODEL, "messages": [{"role": 1, "content": [image_url(a)]}]}),
    }
    for name, content in files.bad().items():
        requests[f"bad file: {name}"] = (path, chat(image_url(encoded(content))))
        padded = encoded(content + b"\0" * 6400)
        requests[f"bad file, padded: {name}"] = (path, chat(image_url(padded)))
    return requests


GOOD = good_requests()
REQUESTS = {**GOOD, **bad_requests()}


def settle(value: Any, key: str = "") -> Any:
    """An answer without what differs from run to run."""
    if key in ("created", "created_at", "completed_at"):
        return 0
    if isinstance(value, dict):
        return {name: settle(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [settle(one) for one in value]
    return re.sub(r"\b(\w+[-_])[0-9a-f-]{16,36}\b", r"\1-0", value) if isinstance(value, str) else value


def differences(seen: Any, stock: Any, where: str = "") -> list[str]:
    """Where two answers differ; float32 on the CPU is equal to 1e-3."""
    if isinstance(seen, dict) and isinstance(stock, dict) and seen.keys() == stock.keys():
        return [found for key in stock for found in differences(seen[key], stock[key], f"{where}.{key}")]
    if isinstance(seen, list | tuple) and isinstance(stock, list | tuple) and len(seen) == len(stock):
        both = enumerate(zip(seen, stock, strict=True))
        return [found for number, (one, other) in both for found in differences(one, other, f"{where}[{number}]")]
    if isinstance(seen, float) and isinstance(stock, float) and abs(seen - stock) <= 1e-3:
        return []
    return [] if seen == stock else [f"{where}: {seen!r:.300} instead of {stock!r:.300}"]


def parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # server-sent events; how many tokens come in one depends on the load
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        return ["".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]]


def ask(url: str, path: str, request: Any) -> tuple[int, Any, Any]:
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    answer = httpx.post(url + path, content=body, headers={"content-type": "application/json"}, timeout=120)
    kept = {key: answer.headers[key] for key in ("content-type",) if key in answer.headers}
    return answer.status_code, kept, settle(parse(answer.text))


def answers(url: str) -> dict[str, list[Any]]:
    """The answers to every request, each asked twice: with images that may be unknown, and with known ones."""
    return {name: [ask(url, *request) for _ in range(2)] for name, request in REQUESTS.items()}


def counters(url: str) -> dict[str, float]:
    shown = httpx.get(url + "/metrics", timeout=60).text
    found = re.findall(r"^mmcache:(\w+)_total(?:{.*})? (\S+)$", shown, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("name", REQUESTS)
def test_as_stock(name: str, stock: Said, plugin: Said) -> None:
    """Status and body, with log-probabilities, and how many tokens were cached."""
    if "padded" not in name:  # some of these open
        assert (stock.answers[name][0][0] == 200) == (name in GOOD), stock.answers[name]
    expected = []
    if name == "chat with uuid":  # identity/ knows that it is the image of a request before; stock goes by the name
        where = "[0][2].usage.prompt_tokens_details."
        expected = [f"{where}cached_tokens: 64 instead of 0", f"{where}created_cache_tokens: 0 instead of 64"]
    assert differences(plugin.answers[name], stock.answers[name]) == expected


def test_warm_turns_decode_nothing(url: str) -> None:
    """A conversation of one more image and one more text turn at a time, by the openai client."""
    client = OpenAI(base_url=f"{url}/v1", api_key="-")
    names = ["w1", "w2", "w3"]
    messages: list[Any] = []
    for name in names:
        messages.append(
            {"role": "user", "content": [image_url(picture(name)), {"type": "text", "text": "What is it?"}]}
        )
        before = counters(url)
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
        assert counters(url)["images_decoded"] == before["images_decoded"] + 1
        messages.append({"role": "assistant", "content": "I see."})
    before = counters(url)
    for stream in (False, True):
        answer = client.chat.completions.create(
            model=MODEL, messages=[*messages, {"role": "user", "content": "And now?"}], max_tokens=2, stream=stream
        )
        if stream:
            assert len(list(answer)) >= 2
    after = counters(url)
    assert after["images_decoded"] == before["images_decoded"]
    assert after["images_avoided"] == before["images_avoided"] + 2 * len(names)
    assert after["images_lifted"] == before["images_lifted"] + 2 * len(names)
    assert after["bytes_lifted"] - before["bytes_lifted"] == 2 * sum(len(picture(name)) for name in names)


def test_one_changed_byte_is_a_new_image(url: str) -> None:
    """Negative control: images that share all but one pixel, so their first kilobytes too."""
    image = ellipses("control", (160, 120))
    tokens = []
    for value in ((0, 0, 0), (255, 255, 255)):
        image.paste(value, (100, 100, 160, 120))
        buffer = io.BytesIO()
        image.save(buffer, "BMP")
        before = counters(url)["images_decoded"]
        answer = ask(url, "/v1/chat/completions", chat(image_url(encoded(buffer.getvalue()), "bmp"), logprobs=True))
        assert counters(url)["images_decoded"] == before + 1
        tokens.append(answer[2])
    assert tokens[0] != tokens[1]


def test_many_at_once(url: str) -> None:
    requests = [chat(image_url(picture(f"at once {number % 5}")), logprobs=True) for number in range(20)]
    alone = [ask(url, "/v1/chat/completions", request) for request in requests[:5]]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda request: ask(url, "/v1/chat/completions", request), requests))
    texts = [[one[2]["choices"][0]["message"]["content"] for one in some] for some in (alone, together)]
    assert texts[1] == texts[0] * 4


def test_chunked_upload_and_a_client_that_goes(url: str) -> None:
    body = json.dumps(chat(image_url(picture("a")))).encode()
    host = url.removeprefix("http://")
    gone = http.client.HTTPConnection(host)
    gone.putrequest("POST", "/v1/chat/completions")
    gone.putheader("content-type", "application/json")
    gone.putheader("content-length", str(len(body)))
    gone.endheaders(body[: len(body) // 2])
    gone.close()
    pieces = (body[at : at + 1000] for at in range(0, len(body), 1000))
    answer = httpx.post(
        url + "/v1/chat/completions", content=pieces, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 200
