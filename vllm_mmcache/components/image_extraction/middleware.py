# SPDX-License-Identifier: Apache-2.0
"""The ASGI layer: receives the body, has its images taken out, and hands the application the short body.

API server process, event loop; bodies are worked on in a thread. The layer is the innermost one, so that a refused
client costs nothing and all others see the body as it came. An error that came while the body was read may repeat or
measure the input: then the application gets the same request once more as it came, and that answer is sent. Once the
request's images are being fetched and opened, nothing is done twice. It must never fail a request itself: after an
error of ours the body goes on as it came.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar

from vllm_mmcache.base.asgi import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    as_message,
    is_plain_json,
    path_of,
    receive_again,
    receive_all,
)
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.components.image_extraction.extract import MIN_TEXT_BYTES, Extraction, extract
from vllm_mmcache.components.image_extraction.request_shapes import WALKERS, Walker
from vllm_mmcache.content import placeholders
from vllm_mmcache.content.base64_image import Base64Image
from vllm_mmcache.content.base64_scan import find_texts
from vllm_mmcache.metrics import counters


class ExtractImagesMiddleware:
    """Pure ASGI. is_eligible is asked for each request that may hold images, by its scope and its path."""

    def __init__(self, app: App, is_eligible: Callable[[Scope, str], bool]) -> None:
        self.app = app
        self.is_eligible = is_eligible

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call; what is no request with images to take out passes untouched.

        The application is called a second time, with the body as it came, where its first answer is an error from
        before anything was fetched, opened or generated. Raises: what the application raises.
        """
        walker = self._walker(scope)
        if walker is None:
            return await self.app(scope, receive, send)
        messages = await receive_all(receive)
        if messages[-1]["type"] != "http.request":  # the client has gone: let the application find out
            return await self.app(scope, receive_again(messages, receive), send)
        body = b"".join([message.get("body", b"") for message in messages])
        del messages
        extraction = await _extract(body, walker)
        if extraction is None:
            return await self.app(scope, receive_again(as_message(body), receive), send)
        counters.BYTES_LIFTED.add(extraction.num_bytes)
        counters.IMAGES_LIFTED.add(len(extraction.payloads))
        before = dict(scope)
        answer = _Answer(send, extraction.payloads)
        token = _ANSWER.set(answer)
        try:
            with placeholders.register(extraction.payloads):
                await self.app(scope, receive_again(as_message(extraction.body), receive), answer.send)
        finally:
            _ANSWER.reset(token)
        if answer.is_dropped:
            scope.clear()
            scope.update(before)
            await self.app(scope, receive_again(as_message(body), receive), send)

    def _walker(self, scope: Scope) -> Walker | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path = path_of(scope)
        walker = WALKERS.get(path)
        if walker is None:
            return None
        try:
            return walker if _is_plain_json(scope) and self.is_eligible(scope, path) else None
        except Exception:
            _count_failure()
            return None


class _Answer:
    """Passes an answer on, but keeps an error back until all of it is there, and one that is to be asked again, ever.

    A 4xx from before anything was begun is: whatever it says of the input, it should say of the input as it came. One
    that came after is not, for it would cost what was begun once more; a name of ours in it is replaced by the text
    that it stands for. Only where a part of a name would be left is the request asked again in any case.
    """

    def __init__(self, send: Send, payloads: Mapping[str, Base64Image]) -> None:
        self._send = send
        self._payloads = payloads
        self._kept: list[Message] | None = None
        self.is_begun = False
        self.is_dropped = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._kept = []
        if self._kept is None:
            return await self._send(message)
        self._kept.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not self.is_dropped:
            kept, self._kept = self._settled(self._kept), None
            if kept is None:
                self._kept, self.is_dropped = [], True
            for one in kept or ():
                await self._send(one)

    def _settled(self, messages: list[Message]) -> list[Message] | None:
        """What is to be sent of an error that is all there; None where the request is to be asked again."""
        body = b"".join([message.get("body", b"") for message in messages])
        is_named = _PART_OF_A_NAME in body
        if not self.is_begun and (messages[0]["status"] < 500 or is_named):
            return None
        if not is_named:
            return messages
        for name in sorted(self._payloads, key=len, reverse=True):  # one may be the beginning of another
            body = body.replace(name.encode(), self._payloads[name].text)
        if _PART_OF_A_NAME in body:
            return None
        headers = [
            (name, b"%d" % len(body) if name.lower() == b"content-length" else value)
            for name, value in messages[0].get("headers", ())
        ]
        return [{**messages[0], "headers": headers}, {"type": "http.response.body", "body": body}]


# Texts that are cut still show that they had one.
_PART_OF_A_NAME = placeholders.PREFIX[:16].encode()
_ANSWER: ContextVar[_Answer | None] = ContextVar("mmcache_answer", default=None)


def work_begun() -> None:
    """From here on the HTTP request that is being answered, if any, has cost what must not be spent on it twice."""
    answer = _ANSWER.get()
    if answer is not None:
        answer.is_begun = True


async def _extract(body: bytes, walker: Walker) -> Extraction | None:
    with counters.BODY_SECONDS.seconds():
        try:
            found = any(find_texts(body, MIN_TEXT_BYTES))
            return await asyncio.to_thread(extract, body, walker) if found else None
        except Exception:
            _count_failure()
            return None


def _count_failure() -> None:
    """Within an except clause: counted, and said once."""
    with failsafe("image_extraction"):
        counters.BODIES_FAILED.add()
        raise


def _is_plain_json(scope: Scope) -> bool:
    length = {name.lower(): value for name, value in scope["headers"]}.get(b"content-length", b"")
    return is_plain_json(scope) and not (length.isdigit() and int(length) < MIN_TEXT_BYTES)
