# SPDX-License-Identifier: Apache-2.0
"""A running server as an attacker sees it, through the openai client, and what an answer tells about its image."""

import base64
import hashlib
import itertools
import random
import re
import time
from typing import Any

import httpx
import openai
from openai import OpenAI
from PIL import Image

from tests.support import files

MODEL = "zoo"
MODES = {"body": "cache_salt", "header": "header:X-Tenant", "api_key": "api_key"}
"""Where a server finds tenants, and the setting tenant_from that has it do so."""
_numbers = itertools.count()


def picture(seed: int | str, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """Noise in large squares: two of them are never alike. size is (width, height)."""
    noise = random.Random(str(seed)).randbytes(16 * 16 * 3)
    return Image.frombytes("RGB", (16, 16), noise).resize(size, Image.Resampling.NEAREST)


def png(seed: int | str, size: tuple[int, int] = (64, 64)) -> bytes:
    return files.saved(picture(seed, size), "PNG", compress_level=0)


def fresh(what: str) -> str:
    """A name that nobody has used yet."""
    return f"{what}-{next(_numbers)}"


def url_of(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


class Reply:
    """What came back. sees is what the model saw, as far as it can be told: equal for equal images, not for others."""

    def __init__(self, status: int, sees: Any, cached_tokens: int, seconds: float, message: str = "") -> None:
        self.status = status
        self.sees = sees
        self.cached_tokens = cached_tokens
        self.seconds = seconds
        self.message = message


class Target:
    """The server. Every question is a chat completion with one image or video.

    A tenant is named by its salt: the client's cache_salt, or what a gateway puts into a header, or the API key.
    """

    def __init__(self, url: str, mode: str = "body", api_key: str = "-") -> None:
        self.url = url
        self.mode = mode
        self.client = OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=60)
        self._truth: dict[str, Any] = {}

    def ask(
        self,
        content: bytes | None = None,
        uuid: str | None = None,
        salt: str | None = None,
        *,
        url: str | None = None,
        video: bool = False,
        **more: Any,
    ) -> Reply:
        """One question. Without content and url it carries the uuid alone."""
        kind = "video_url" if video else "image_url"
        if content is not None:
            url = url_of(content)
        part: dict[str, Any] = {"type": kind, kind: None if url is None else {"url": url}}
        if uuid is not None:
            part["uuid"] = uuid
        if salt is not None and self.mode == "body":
            more["cache_salt"] = salt
        messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]
        start = time.perf_counter()
        try:
            found: Any = self.client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=3, temperature=0, logprobs=True, top_logprobs=5,
                extra_body=more, extra_headers=self.headers(salt),
            )  # fmt: skip
        except openai.APIStatusError as error:
            return Reply(error.status_code, None, 0, time.perf_counter() - start, str(error))
        seconds = time.perf_counter() - start
        first = found.choices[0].logprobs.content[0]
        sees = (found.choices[0].message.content, {one.token: round(one.logprob, 2) for one in first.top_logprobs})
        cached = found.usage.prompt_tokens_details.cached_tokens or 0
        return Reply(200, sees, cached, seconds)

    def headers(self, salt: str | None) -> dict[str, str]:
        """The headers of a tenant's requests; none for those without a tenant."""
        if salt is None or self.mode == "body":
            return {}
        return {"X-Tenant": salt} if self.mode == "header" else {"Authorization": f"Bearer {salt}"}

    def truth(self, content: bytes | None = None, *, url: str | None = None, **more: Any) -> Any:
        """What the model sees in an image: asked once, under a salt of its own and without a uuid."""
        url = url or url_of(content or b"")
        key = hashlib.sha256(f"{url} {more}".encode()).hexdigest()
        if key not in self._truth:
            reply = self.ask(None, salt=f"truth-{key}", url=url, **more)
            assert reply.status == 200, reply.message
            self._truth[key] = reply.sees
        return self._truth[key]

    def counters(self) -> dict[str, float]:
        """All totals on /metrics, by name and without labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(r"^([\w:]+)_total(?:{.*})? (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def samples(self) -> dict[str, float]:
        """All that /metrics says of mmcache and of vLLM's caches, labels included, but for times."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(r"^((?:mmcache:|vllm:\w*cache_)\S+(?: \S+)*) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found if "seconds" not in name and "_created" not in name}

    def mm_hash(self, content: bytes) -> str:
        """vLLM's own id of an image, as the render endpoint gives it away."""
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(content)}}]}]
        path = f"{self.url}/v1/chat/completions/render"
        answer = httpx.post(path, json={"model": MODEL, "messages": messages}, timeout=60).raise_for_status().json()
        (found,) = answer["features"]["mm_hashes"]["image"]
        return str(found)

    def evict(self) -> None:
        """Send so many images that the processor cache holds none of the earlier ones."""
        for _ in range(40):
            self.ask(png(fresh("evict"), (320, 320)), salt=fresh("evict"))
