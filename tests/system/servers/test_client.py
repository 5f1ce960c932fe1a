# SPDX-License-Identifier: Apache-2.0
"""Real servers, stock and with the plugin, and real openai clients: the same answers with and without the transport."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached
from openai import AsyncOpenAI, OpenAI

from tests.support import files
from tests.support.sizes import larger
from tests.system.image_extraction.test_server import differences, encoded, image_url, picture, settle
from vllm_mmcache.client import AsyncOnceTransport, OnceTransport, async_http_client, http_client
from vllm_mmcache.exactness.pictures import ellipses

pytestmark = pytest.mark.engine

MODEL = "zoo"
ARGS = (
    *CPU_ARGS, "--served-model-name", MODEL, "--limit-mm-per-prompt", '{"image": 4}', "--enable-prefix-caching",
)  # fmt: skip
SIDES = {
    "stock": ({"MMCACHE_DISABLE": "1"}, ()),
    "plugin": ({}, ()),
    "stock without a processor cache": ({"MMCACHE_DISABLE": "1"}, ("--mm-processor-cache-gb", "0")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(
    scope="module", params=[pytest.param(side, marks=larger if "without" in side else ()) for side in SIDES]
)
def side(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def url(side: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    env, args = SIDES[side]
    log_path = tmp_path_factory.mktemp("log") / "log"
    with serve(model, log_path=log_path, env={"VLLM_SERVER_DEV_MODE": "1", **env}, args=(*ARGS, *args)) as server:
        yield server.url


class Scale:
    """Wraps httpx's transport and keeps the sizes of the bodies that leave the client, and how they were answered."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.sent: list[tuple[int, int]] = []

    def handle_request(self, request: Any) -> Any:
        response = self.inner.handle_request(request)
        self.sent.append((len(request.content), response.status_code))
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # opening and closing

    async def handle_async_request(self, request: Any) -> Any:
        response = await self.inner.handle_async_request(request)
        self.sent.append((len(request.content), response.status_code))
        return response


def client(url: str, transport: Any = None, library: Any = httpx2) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, http_client=library.Client(transport=transport))


def question(text: str, *names: str) -> dict[str, Any]:
    content = [*(image_url(picture(name)) for name in names), {"type": "text", "text": text}]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
    }


def answer(client: OpenAI, request: dict[str, Any]) -> Any:
    """The answer without times and ids, and without how much of it was cached."""
    found = settle(client.chat.completions.create(**request).model_dump())
    del found["usage"]["prompt_tokens_details"]
    return found


def forget(url: str) -> None:
    """Empty the server's caches, as a restart does."""
    for cache in ("mm", "prefix", "encoder"):
        httpx.post(f"{url}/reset_{cache}_cache", timeout=60).raise_for_status()


def remembers(side: str) -> bool:
    return "without" not in side


IMAGE_BYTES = len(picture("a"))


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_same_answers_and_small_bodies(url: str, side: str, library: Any) -> None:
    scale = Scale(library.HTTPTransport())
    once, plain = client(url, OnceTransport(scale), library), client(url)
    names = [f"{library.__name__} {one}" for one in "ab"]
    for turn in range(3):
        request = question(f"Turn {turn}?", *names)
        assert not differences(answer(once, request), answer(plain, request))
    whole = 2 * IMAGE_BYTES
    if remembers(side):
        assert [(size > whole, status) for size, status in scale.sent] == [(True, 200), (False, 200), (False, 200)]
        assert scale.sent[1][0] < 1000
    else:
        assert [status for size, status in scale.sent if size > whole] == [200] * 3


def test_streams(url: str) -> None:
    once, plain = client(url, OnceTransport(httpx2.HTTPTransport())), client(url)
    for turn in range(2):
        request = question(f"Turn {turn}?", "stream")
        streams = [list(one.chat.completions.create(**request, stream=True)) for one in (once, plain)]
        texts = ["".join(event.choices[0].delta.content or "" for event in events) for events in streams]
        assert texts[0] == texts[1]


def test_async(url: str, side: str) -> None:
    scale = Scale(httpx2.AsyncHTTPTransport())
    request = question("And now?", "async")

    async def turns() -> list[Any]:
        transport: Any = AsyncOnceTransport(scale)
        async with httpx2.AsyncClient(transport=transport) as http:
            once = AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, http_client=http)
            found = [await once.chat.completions.create(**request) for _ in range(2)]
            stream = await once.chat.completions.create(**request, stream=True)
            texts = [event.choices[0].delta.content or "" async for event in stream]
            assert "".join(texts) == found[0].choices[0].message.content
            return [settle(one.model_dump()) for one in found]

    expected = answer(client(url), request)
    for one in asyncio.run(turns()):
        del one["usage"]["prompt_tokens_details"]
        assert not differences(one, expected)
    if remembers(side):
        assert [size > IMAGE_BYTES for size, _ in scale.sent] == [True, False, False]


def test_forgotten_images(url: str, side: str) -> None:
    scale = Scale(httpx2.HTTPTransport())
    once = client(url, OnceTransport(scale))
    request = question("And now?", "f1", "f2")
    expected = answer(once, request)
    forget(url)
    assert not differences(answer(once, request), expected)
    forget(url)
    events = list(once.chat.completions.create(**request, stream=True))
    assert (
        "".join(event.choices[0].delta.content or "" for event in events)
        == (expected["choices"][0]["message"]["content"])
    )
    if remembers(side):
        sizes = [(size > IMAGE_BYTES, status) for size, status in scale.sent]
        assert sizes == [(True, 200), (False, 400), (True, 200), (False, 400), (True, 200)]


def test_tenants(url: str, side: str) -> None:
    """With a cache_salt as without: small bodies, and each tenant sends an image itself."""
    scale = Scale(httpx2.HTTPTransport())
    once, plain = client(url, OnceTransport(scale)), client(url)
    request = question("Whose?", "tenants")
    for salt in ("salt a", "salt b", "salt a", "salt b"):
        salted = {**request, "extra_body": {"cache_salt": salt}}
        assert not differences(answer(once, salted), answer(plain, request))
    if remembers(side):
        assert [(size > IMAGE_BYTES, status) for size, status in scale.sent] == [(True, 200)] * 2 + [(False, 200)] * 2


def test_images_are_never_mixed(url: str) -> None:
    """Two pictures whose bytes differ near their end only, in every order, forgotten in between."""
    once, plain = client(url, OnceTransport(httpx2.HTTPTransport())), client(url)
    urls = {}
    for name, value in (("a", (0, 0, 0)), ("b", (255, 255, 255))):
        image = ellipses("control", (160, 120))
        image.paste(value, (0, 60, 160, 120))
        urls[name] = image_url(encoded(files.saved(image, "TIFF")), "tiff")
    answers = {}
    for order in ("ab", "ba", "aa", "bb", "ab"):
        request = question("Which?")
        request["messages"][0]["content"][:0] = [urls[one] for one in order]
        answers[order] = answer(once, request)
        assert not differences(answers[order], answer(plain, request))
        if order == "aa":
            forget(url)
    assert differences(answers["aa"], answers["bb"])


def test_off(url: str) -> None:
    scale = Scale(httpx2.HTTPTransport())
    off = client(url, OnceTransport(scale, enabled=False))
    for _ in range(2):
        off.chat.completions.create(**question("Off?", "off"))
    assert len({size for size, _ in scale.sent}) == 1
    assert scale.sent[0][0] > IMAGE_BYTES


@pytest.mark.parametrize("wrong", ["base64", "too many", "prompt too long", "no such model", "field"])
def test_errors_pass(url: str, wrong: str) -> None:
    once, plain = client(url, OnceTransport(httpx2.HTTPTransport())), client(url)
    good = question("Good?", "e1", "e2")
    once.chat.completions.create(**good)  # so that the bad ones go out with ids
    bad = question("Good?", "e1", "e2")
    content = bad["messages"][0]["content"]
    if wrong == "base64":
        content.append(image_url(picture("e3")[:-8] + "!!!!"))
    elif wrong == "too many":
        content += content[:2] * 2
    elif wrong == "prompt too long":
        content.append({"type": "text", "text": "word " * 20_000})
    elif wrong == "no such model":
        bad["model"] = "other"
    else:
        bad["extra_body"] = {"temperature": "warm"}
        del bad["temperature"]
    errors = []
    for one in (once, plain):
        with pytest.raises(openai.APIStatusError) as raised:
            one.chat.completions.create(**bad)
        errors.append((type(raised.value), raised.value.status_code, settle(raised.value.body)))
    assert errors[0] == errors[1]


def test_constructors(url: str) -> None:
    request = question("Made how?", "made")
    with OpenAI(base_url=f"{url}/v1", api_key="-", http_client=http_client()) as sync:
        texts = [sync.chat.completions.create(**request).choices[0].message.content for _ in range(2)]

    async def ask() -> str | None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="-", http_client=async_http_client()) as other:
            return (await other.chat.completions.create(**request)).choices[0].message.content

    assert {*texts, asyncio.run(ask())} == {client(url).chat.completions.create(**request).choices[0].message.content}
