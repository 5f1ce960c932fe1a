# SPDX-License-Identifier: Apache-2.0
"""The layer around a bare ASGI application that resolves references, as vLLM's media threads do."""

import asyncio
import base64
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.unit.components.image_extraction.test_extract import chat, image, text_of, url_of
from vllm_mmcache.base.asgi import Message
from vllm_mmcache.components.image_extraction import extract as extracting
from vllm_mmcache.components.image_extraction import middleware
from vllm_mmcache.components.image_extraction.middleware import ExtractImagesMiddleware
from vllm_mmcache.content import placeholders
from vllm_mmcache.metrics import counters

PATH = "/v1/chat/completions"
BODY = json.dumps(chat(image("a"))).encode()


class Application:
    """Answers with what it saw: the request, and the content of each image as vLLM's loader would get it."""

    def __init__(self, status: int = 200, asks_engine: bool = False, says: bytes = b"") -> None:
        self.status = status
        self.asks_engine = asks_engine
        self.says = says
        self.num_engine_requests = 0
        self.bodies: list[bytes] = []
        self.scopes: list[dict[str, Any]] = []
        self.ends: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(dict(scope))
        scope["endpoint"] = "routed"
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ends.append("disconnect")
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        images = []
        if self.status == 200:
            for part in json.loads(body)["messages"][0]["content"]:
                text = part["image_url"]["url"].partition(",")[2]
                await asyncio.sleep(0)
                payload = await asyncio.to_thread(placeholders.resolve, text)
                images.append((payload.decode() if payload else base64.b64decode(text)).hex())
        if self.asks_engine:
            self.num_engine_requests += 1
            await asyncio.create_task(ask_engine())
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        if self.says:
            said = self.says.replace(b"NAME", name_in(body))
            for at in range(0, len(said), 10):
                await send({"type": "http.response.body", "body": said[at : at + 10], "more_body": True})
        for shown in (*images, str(len(body))):
            await send({"type": "http.response.body", "body": shown.encode() + b"\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ends.append((await receive())["type"])


async def ask_engine() -> None:
    """As vLLM does it: in tasks of the request's task, and the engine's client says that it has taken the request."""
    await asyncio.sleep(0)
    middleware.work_begun()


def name_in(body: bytes) -> bytes:
    """What stands where the image's text stood."""
    url: str = json.loads(body)["messages"][0]["content"][0]["image_url"]["url"]
    return url.partition(",")[2].encode()


def scope_of(path: str = PATH, method: str = "POST", **headers: str) -> dict[str, Any]:
    headers = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    raw = [(name.encode(), value.encode()) for name, value in headers.items() if value]
    return {"type": "http", "method": method, "path": path, "root_path": "", "headers": raw}


def in_chunks(body: bytes, size: int = 4096) -> list[Message]:
    pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    return [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces) - 1}
        for number, piece in enumerate(pieces)
    ]


async def ask(
    application: Any,
    messages: Sequence[Message],
    scope: dict[str, Any] | None = None,
    is_eligible: Callable[[Any, str], bool] = lambda scope, path: True,
) -> list[Message]:
    """The answer's messages. After the request's own messages the client disconnects."""
    incoming = iter(messages)
    answer: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(0)
        return next(incoming, {"type": "http.disconnect"})

    async def send(message: Message) -> None:
        answer.append(message)

    await ExtractImagesMiddleware(application, is_eligible)(scope or scope_of(), receive, send)
    return answer


def test_images_arrive_and_the_body_is_short() -> None:
    application = Application()
    body = json.dumps(chat(image("a"), image("b"), image("a"))).encode()
    answer = asyncio.run(ask(application, in_chunks(body)))
    shown = b"".join(message.get("body", b"") for message in answer).decode().split()
    assert shown[:3] == [base64.b64decode(text_of(name)).hex() for name in "aba"]
    assert len(application.bodies[0]) < 1000 < len(body)
    assert application.ends == ["http.disconnect"]
    assert not placeholders.size().entries


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_that_of_the_whole_body(status: int) -> None:
    """Errors repeat and measure the input: the application refuses the body as it came, and only that is sent."""
    application = Application(status)
    body = BODY
    scope = scope_of()
    answer = asyncio.run(ask(application, in_chunks(body), scope))
    assert [len(seen) < 1000 for seen in application.bodies] == [True, False]
    assert application.bodies[1] == body
    assert [message["type"] for message in answer].count("http.response.start") == 1
    assert answer[1]["body"] == f"{len(body)}\n".encode()
    assert "endpoint" not in application.scopes[1]
    assert scope["endpoint"] == "routed"


def test_a_server_error_is_not_asked_for_twice() -> None:
    application = Application(500)
    answer = asyncio.run(ask(application, in_chunks(BODY)))
    assert len(application.bodies) == 1
    assert answer[0]["status"] == 500
    assert b"".join(message.get("body", b"") for message in answer).startswith(str(len(application.bodies[0])).encode())


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_what_the_engine_has_answered_is_not_asked_for_twice(status: int) -> None:
    """A parser of the output may refuse what was generated: to generate it once more would cost that much again."""
    application = Application(status, asks_engine=True, says=b"the model said nonsense")
    answer = asyncio.run(ask(application, in_chunks(BODY)))
    assert application.num_engine_requests == 1
    assert answer[0]["status"] == status
    assert b"".join(message.get("body", b"") for message in answer).startswith(b"the model said nonsense")
    assert answer[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("asks_engine", [False, True])
@pytest.mark.parametrize("status", [400, 500])
def test_an_error_that_holds_a_name_of_ours_is_never_sent(status: int, asks_engine: bool) -> None:
    """Also one that comes in pieces, none of which holds the whole name. What was begun is not done twice for it."""
    application = Application(status, asks_engine, says=b"no image: NAME!")
    answer = asyncio.run(ask(application, in_chunks(BODY)))
    said = b"".join(message.get("body", b"") for message in answer)
    assert said.startswith(b"no image: " + text_of("a").encode() + b"!")
    assert placeholders.PREFIX.encode() not in said
    assert len(application.bodies) == (1 if asks_engine else 2)
    assert answer[-1].get("more_body", False) is False


@pytest.mark.parametrize("spelled", [b"content-length", b"Content-Length"], ids=["small letters", "capitals"])
def test_an_error_with_many_names_tells_its_length(spelled: bytes) -> None:
    """A name may be the beginning of another one."""
    names = [f"image {number}" for number in range(12)]
    body = json.dumps(chat(*map(image, names))).encode()

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        parts = json.loads((await receive())["body"])["messages"][0]["content"]
        said = "; ".join(part["image_url"]["url"].partition(",")[2] for part in parts[:12]).encode()
        middleware.work_begun()
        headers = [(b"content-type", b"text/plain"), (spelled, str(len(said)).encode())]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    start, *rest = asyncio.run(ask(refuse, in_chunks(body)))
    said = b"".join(message["body"] for message in rest)
    assert said == "; ".join(map(text_of, names)).encode()
    assert start["headers"] == [(b"content-type", b"text/plain"), (spelled, str(len(said)).encode())]


def test_an_error_that_holds_a_part_of_a_name_is_asked_for_again() -> None:
    """Of a text that was cut nobody can say what it was cut from."""
    application = Application(400, asks_engine=True, says=b"no image: " + placeholders.PREFIX[:20].encode() + b"...")
    asyncio.run(ask(application, in_chunks(BODY)))
    assert [len(seen) < 1000 for seen in application.bodies] == [True, False]


def test_engines_are_asked_by_requests_apart() -> None:
    """A refusal that came before the engine is asked for again, whatever another request did in the meantime."""
    early, late = Application(400), Application(400, asks_engine=True)

    async def both() -> None:
        await asyncio.gather(ask(early, in_chunks(BODY)), ask(late, in_chunks(BODY)))

    asyncio.run(both())
    assert [len(early.bodies), len(late.bodies)] == [2, 1]
    middleware.work_begun()  # outside of any request


def test_an_error_of_ours_passes_the_body_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Counted, and said once. Every step of ours may be the one that fails."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("ours")

    def is_eligible(scope: Any, path: str) -> bool:
        raise RuntimeError("ours")

    monkeypatch.setattr("vllm_mmcache.base.failsafe._logged", set())
    for module, name in (
        (middleware, "find_texts"),
        (middleware, "extract"),
        (extracting, "replace_spans"),
        (extracting, "Base64Image"),
    ):
        before = counters.BODIES_FAILED.value
        application = Application(201)
        with monkeypatch.context() as context:
            context.setattr(module, name, fails)
            asyncio.run(ask(application, in_chunks(BODY)))
        assert application.bodies == [BODY]
        assert counters.BODIES_FAILED.value == before + 1
    application = Application(201)
    asyncio.run(ask(application, in_chunks(BODY), is_eligible=is_eligible))
    assert application.bodies == [BODY]
    assert counters.BODIES_FAILED.value == before + 2
    assert caplog.text.count("bookkeeping of image_extraction failed") == 1
    application = Application()
    asyncio.run(ask(application, in_chunks(BODY)))
    assert len(application.bodies[0]) < 1000


@pytest.mark.parametrize(
    "scope",
    [
        scope_of(path="/v1/completions"),
        scope_of(path="/v1/rerank"),
        scope_of(method="GET"),
        scope_of(content_type="multipart/form-data; boundary=x"),
        scope_of(content_type=""),
        scope_of(content_encoding="gzip"),
        scope_of(content_length="500"),
    ],
)
def test_other_requests_pass_as_they_come(scope: dict[str, Any]) -> None:
    application = Application(201)
    messages = in_chunks(json.dumps(chat(image("a"))).encode())
    asyncio.run(ask(application, messages, scope))
    assert application.bodies == [b"".join(message["body"] for message in messages)]


def test_where_it_may_not_lift() -> None:
    application = Application(201)
    body = json.dumps(chat(image("a"))).encode()
    asked: list[str] = []
    asyncio.run(ask(application, in_chunks(body), is_eligible=lambda scope, path: bool(asked.append(path))))
    assert application.bodies == [body]
    assert asked == [PATH]


def test_root_path_and_content_type_parameters() -> None:
    application = Application()
    scope = scope_of(path="/api" + PATH, content_type="Application/JSON; charset=utf-8") | {"root_path": "/api"}
    asyncio.run(ask(application, in_chunks(json.dumps(chat(image("a"))).encode()), scope))
    assert len(application.bodies[0]) < 1000


def test_a_client_that_goes_during_the_upload() -> None:
    application = Application()
    messages = in_chunks(json.dumps(chat(image("a"))).encode(), 500)[:-1]
    assert asyncio.run(ask(application, messages)) == []
    assert application.ends == ["disconnect"]
    assert not placeholders.size().entries


def test_an_application_that_fails() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        assert placeholders.size().entries == 1
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(ask(fails, in_chunks(json.dumps(chat(image("a"))).encode())))
    assert not placeholders.size().entries


def test_references_end_with_their_request() -> None:
    """A name that a client got hold of is text like any other, in its next request and in everybody's."""
    application = Application()
    asyncio.run(ask(application, in_chunks(json.dumps(chat(image("a"))).encode())))
    url = json.loads(application.bodies[0])["messages"][0]["content"][0]["image_url"]["url"]
    name = url.partition(",")[2]
    assert name.startswith(placeholders.PREFIX)
    assert placeholders.resolve(name) is None
    application = Application(201)
    body = json.dumps(chat({"type": "image_url", "image_url": {"url": url}})).encode()
    asyncio.run(ask(application, in_chunks(body)))
    assert application.bodies == [body]


def test_many_at_once() -> None:
    """Each gets its own images, whatever comes in between."""

    async def all_of_them() -> list[list[Message]]:
        return await asyncio.gather(*(one(number) for number in range(40)))

    async def one(number: int) -> list[Message]:
        names = random.Random(number).choices("abcdef", k=3)
        return await ask(Application(), in_chunks(json.dumps(chat(*map(image, names))).encode(), 700 + number))

    for number, answer in enumerate(asyncio.run(all_of_them())):
        names = random.Random(number).choices("abcdef", k=3)
        shown = b"".join(message.get("body", b"") for message in answer).decode().split()
        assert shown[:3] == [base64.b64decode(text_of(name)).hex() for name in names]
    assert not placeholders.size().entries


def test_a_text_that_looks_like_an_image_is_not_taken() -> None:
    application = Application(201)
    body = json.dumps(chat({"type": "text", "text": url_of("a")})).encode()
    asyncio.run(ask(application, in_chunks(body)))
    assert application.bodies == [body]
