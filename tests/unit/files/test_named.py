# SPDX-License-Identifier: Apache-2.0
"""Images by uuid between two replicas that share a place; the application says what it was asked."""

import asyncio
import base64
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.unit.files.test_endpoints import CHAT, MAX_BYTES, echo, picture
from vllm_mmcache.content import placeholders
from vllm_mmcache.content.content_name import MAX_UUID_CHARS, name_of
from vllm_mmcache.files import named as named_module
from vllm_mmcache.files.middleware import PutFilesMiddleware
from vllm_mmcache.files.named import NamedImages
from vllm_mmcache.files.references import NamedImage, named_images
from vllm_mmcache.files.store import ENTRY_BYTES, FileStore
from vllm_mmcache.storage.encryption import PLAIN


class Replica:
    """One of several; `known` are uuids that it knows itself."""

    def __init__(self, folder: Path, quota: int = 10**6) -> None:
        self.known: set[tuple[str, str | None]] = set()

        def store(below: str) -> FileStore:
            root = f"{folder}/{below}"
            return FileStore(fsspec.filesystem("file"), root, codec=PLAIN, ttl_s=0, quota=quota)

        named = NamedImages(store("named"), lambda uuid, salt: (uuid, salt) in self.known, MAX_BYTES)
        layer = Middleware(
            PutFilesMiddleware,
            store=store("files"),
            may_name_files=(CHAT, "/tokenize").__contains__,
            takes_files=lambda scope, path: True,
            named_images=named,
        )
        self.status = 200  # of what the application answers; 0 for an exception

        async def answer(request: Any) -> Any:
            response = await echo(request)
            if not self.status:
                raise RuntimeError("the application fails, says a test")
            response.status_code = self.status
            return response

        routes = [Route(path, answer, methods=["POST"]) for path in (CHAT, "/tokenize")]
        self.client = TestClient(Starlette(routes=routes, middleware=[layer]))

    def refuse(self, *parts: Any) -> None:
        """Ask, and have the application refuse it."""
        self.status = 400
        assert self._post(parts, None, CHAT).status_code == 400
        self.status = 200

    def ask(self, *parts: Any, salt: str | None = None, path: str = CHAT) -> Any:
        answer = self._post(parts, salt, path).raise_for_status().json()
        return json.loads(answer["body"])["messages"][0]["content"], [one["content"] for one in answer["images"]]

    def _post(self, parts: Sequence[Any], salt: str | None, path: str) -> Any:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": list(parts)}]}
        sent = json.dumps(body | ({"cache_salt": salt} if salt else {}))
        return self.client.post(path, content=sent, headers={"content-type": "application/json"})


def image(uuid: str, content: bytes | None) -> dict[str, Any]:
    url = None if content is None else {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}
    return {"type": "image_url", "image_url": url, "uuid": uuid}


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[tuple[Replica, Replica]]:
    yield Replica(tmp_path), Replica(tmp_path)
    assert placeholders.size().entries == 0


def test_a_uuid_is_known_to_all_replicas(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    sent = image("a", picture())
    assert one.ask(sent) == ([sent], []), "what comes whole goes on as it came"
    parts, contents = other.ask({"type": "text", "text": "And this?"}, image("a", None))
    assert parts[1]["uuid"] == "a"
    assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,mmcache-")
    assert contents == [picture().hex()]


def test_a_digest_that_a_replica_knows_itself_is_not_looked_for(replicas: tuple[Replica, Replica]) -> None:
    """It can stand for one image alone. Any other uuid may have been given to another image meanwhile."""
    one, other = replicas
    digest = name_of(picture())
    for uuid, looked_for in (digest, False), ("a", True):
        one.ask(image(uuid, picture()))
        other.known.add((uuid, None))
        assert bool(other.ask(image(uuid, None))[1]) == looked_for


def test_a_uuid_that_another_replica_has_given_to_another_image(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture(color=1)))
    one.known.add(("a", None))
    other.ask(image("a", picture(color=2)))
    assert one.ask(image("a", None))[1] == [picture(color=2).hex()]
    one.ask(image("a", picture(color=1)))
    assert other.ask(image("a", None))[1] == [picture(color=1).hex()], "it was written again"


def test_a_uuid_that_the_request_itself_gives_to_an_image(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture(color=1)))
    again = [image("a", picture(color=2)), image("a", None)]
    assert other.ask(*again) == (again, [])
    assert one.ask(image("a", None))[1] == [picture(color=2).hex()]


@pytest.mark.parametrize(
    "url", ["https://host/a.png", f"data:image/png;base64,{'A' * MAX_BYTES * 2}"], ids=["url", "data"]
)
def test_what_came_last_and_was_not_saved_counts(replicas: tuple[Replica, Replica], url: str) -> None:
    """The store has nothing under the uuid any more, or other replicas would take what came before."""
    one, other = replicas
    one.ask(image("a", picture()))
    one.known.add(("a", None))
    one.ask({"type": "image_url", "image_url": {"url": url}, "uuid": "a"})
    for replica in one, other:
        assert replica.ask(image("a", None)) == ([image("a", None)], [])


OTHER_FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "as of Responses": lambda url: {"type": "input_image", "image_url": url, "uuid": "7"},
    "without a type": lambda url: {"image_url": url, "uuid": "7"},
    "of another type": lambda url: {"type": "text", "text": "x", "image_url": {"url": url}, "uuid": "7"},
    "a number": lambda url: {"type": "image_url", "image_url": {"url": url}, "uuid": 7},
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_whatever_vllm_takes_for_an_image_by_a_uuid(replicas: tuple[Replica, Replica], form: str) -> None:
    one, other = replicas
    one.ask(image("7", picture(color=1)))
    one.known.add(("7", None))
    url = image("7", picture(color=2))["image_url"]["url"]
    sent = OTHER_FORMS[form](url)
    assert one.ask(sent, image("7", None)) == ([sent, image("7", None)], []), "the request itself gives it to an image"
    for replica in one, other:
        assert replica.ask(image("7", None))[1] == [picture(color=2).hex()]


def test_a_uuid_whose_key_is_written_otherwise(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture(color=1)))
    body = json.dumps({"messages": [{"role": "user", "content": [image("a", picture(color=2))]}]})
    headers = {"content-type": "application/json"}
    one.client.post(CHAT, content=body.replace('"uuid"', '"\\u0075uid"'), headers=headers).raise_for_status()
    assert other.ask(image("a", None))[1] == [picture(color=2).hex()]


@pytest.mark.parametrize("key", ["messages", "data_1", "inputs"])
def test_conversations_of_a_batch_and_other_contents(replicas: tuple[Replica, Replica], key: str) -> None:
    one, other = replicas
    value = [{"role": "user", "content": [image("a", picture())]}]
    sent = json.dumps({key: [value] if key == "messages" else value})
    one.client.post(CHAT, content=sent, headers={"content-type": "application/json"}).raise_for_status()
    assert other.ask(image("a", None))[1] == [picture().hex()]


def test_an_empty_url_is_a_uuid_alone_and_no_url_is_nothing(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture()))
    assert other.ask({"type": "image_url", "image_url": {"url": ""}, "uuid": "a"})[1] == [picture().hex()]
    bare = {"type": "image_url", "uuid": "a"}
    assert other.ask(bare) == ([bare], []), "vLLM refuses it"


def test_a_digest_is_never_given_to_another_image(replicas: tuple[Replica, Replica], tmp_path: Path) -> None:
    one, other = replicas
    digest = name_of(picture(color=1))
    one.ask(image(digest, picture(color=1)))
    other.ask(image(digest, picture(color=2)))
    other.ask({"type": "image_url", "image_url": {"url": "https://host/a.png"}, "uuid": digest})
    assert Replica(tmp_path).ask(image(digest, None))[1] == [picture(color=1).hex()]


def test_what_a_refused_request_says_is_not_believed(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture(color=1)))
    digest = name_of(picture(color=1))
    one.ask(image(digest, picture(color=1)))
    one.refuse(image("a", picture(color=2)), image(digest, picture(color=1)))
    assert other.ask(image("a", None)) == ([image("a", None)], [])
    assert other.ask(image(digest, None))[1] == [picture(color=1).hex()]


def test_the_uuids_of_a_request_are_looked_for_once_and_not_without_end(
    replicas: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = replicas
    for uuid in "abc":
        one.ask(image(uuid, picture()))
    monkeypatch.setattr(named_module, "MOST_LOOKED_FOR", 2)
    asked: list[str] = []
    find = FileStore.find_named
    monkeypatch.setattr(FileStore, "find_named", lambda self, key, uuid: (asked.append(uuid), find(self, key, uuid))[1])
    parts, contents = other.ask(*(image(uuid, None) for uuid in "aabac"))
    assert sorted(asked) == ["a", "b"]
    assert contents == [picture().hex()] * 4
    assert parts[4] == image("c", None)


def test_a_path_without_an_api_key_writes_nothing(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture()), path="/tokenize")
    assert other.ask(image("a", None))[1] == []
    one.ask(image("a", picture()))
    assert other.ask(image("a", None), path="/tokenize")[1] == [picture().hex()]


def test_unknown_uuids_and_those_of_other_tenants(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture()), salt="alice")
    for uuid, salt in (("a", None), ("a", "bob"), ("b", "alice"), ("", "alice"), ("../../a", "alice")):
        assert other.ask(image(uuid, None), salt=salt) == ([image(uuid, None)], [])
    assert other.ask(image("a", None), salt="alice")[1] == [picture().hex()]


def test_no_text_of_a_client_takes_the_place_out_of_service(replicas: tuple[Replica, Replica]) -> None:
    """Half of a surrogate pair is in JSON, and in no UTF-8."""
    one, other = replicas
    for uuid in ("\x00", "a" * MAX_UUID_CHARS):
        one.ask(image(uuid, picture()))
        assert other.ask(image(uuid, None))[1] == [picture().hex()]
    for content in picture(), None:
        sent = image("\ud800", content)
        assert one.ask(sent) == ([sent], []), "identity refuses it"
    one.ask(image("a", picture()))
    assert other.ask(image("a", None))[1] == [picture().hex()]


def test_a_uuid_that_is_too_long_is_not_kept(replicas: tuple[Replica, Replica], tmp_path: Path) -> None:
    one, other = replicas
    sent = image("a" * (MAX_UUID_CHARS + 1), picture())
    assert one.ask(sent) == ([sent], []), "identity refuses it"
    assert other.ask(image(sent["uuid"], None))[1] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_is_said_of_an_image_takes_no_more_than_the_quota_counts(
    replicas: tuple[Replica, Replica], tmp_path: Path
) -> None:
    """The media type that a client names may be of any length."""
    one, other = replicas
    sent = image("a", picture())
    sent["image_url"]["url"] = sent["image_url"]["url"].replace("image/png", "image/" + "p" * ENTRY_BYTES)
    one.ask(sent)
    parts, contents = other.ask(image("a", None))
    assert contents == [picture().hex()]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert all(path.stat().st_size <= ENTRY_BYTES for path in tmp_path.rglob("*.json"))


def test_a_uuid_stands_for_what_came_with_it_last(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    for color in (1, 2, 2, 1):
        one.ask(image("a", picture(color=color)))
        assert other.ask(image("a", None))[1] == [picture(color=color).hex()]


def test_only_images_are_kept(replicas: tuple[Replica, Replica], tmp_path: Path) -> None:
    one, _ = replicas
    for number, content in enumerate((b"no image", picture() + bytes(MAX_BYTES), b"")):
        one.ask(image(str(number), content))
    one.ask({"type": "image_url", "image_url": {"url": "https://host/a.png"}, "uuid": "x"})
    one.ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,?!"}, "uuid": "x"})
    one.ask({"type": "image_url", "image_url": {"url": 1}, "uuid": "x"})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_quota_that_is_used_up_refuses_nobody(tmp_path: Path) -> None:
    one, other = Replica(tmp_path, quota=ENTRY_BYTES + 1000), Replica(tmp_path)
    for uuid in "ab":
        one.ask(image(uuid, picture()))
    assert [bool(other.ask(image(uuid, None))[1]) for uuid in "ab"] == [True, False]


def test_a_place_that_does_not_serve_refuses_nobody(tmp_path: Path) -> None:
    (tmp_path / "named").write_text("no directory")
    one = Replica(tmp_path)
    assert one.ask(image("a", picture()))[1] == []
    assert one.ask(image("a", None)) == ([image("a", None)], [])


def test_what_is_known_to_be_kept_is_not_written_again(
    replicas: tuple[Replica, Replica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = replicas
    one.ask(image("a", picture()))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) == 2
    one.ask(image("a", picture()))
    assert {path: path.stat().st_mtime_ns for path in written} == written
    monkeypatch.setattr(named_module, "RENEW_S", 0.0)
    one.ask(image("a", picture()))
    assert {path: path.stat().st_mtime_ns for path in written} != written


def test_a_refused_request_takes_back_what_it_has_written_alone(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture()))
    one.refuse(image("a", picture()))
    assert other.ask(image("a", None))[1] == [picture().hex()]


def test_a_request_that_ends_in_an_error_is_refused(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.ask(image("a", picture(color=1)))
    one.status = 0
    with pytest.raises(RuntimeError, match="says a test"):
        one.ask(image("a", picture(color=2)))
    assert other.ask(image("a", None))[1] == []


def test_text_that_is_no_base64_is_no_error_of_ours(
    replicas: tuple[Replica, Replica], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = replicas
    one.ask(image("a", picture()))
    with caplog.at_level(logging.WARNING, "vllm.mmcache"):
        one.ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,?!"}, "uuid": "a"})
    assert not caplog.records
    assert other.ask(image("a", None))[1] == []


def test_saves_of_one_uuid_are_made_in_the_order_of_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one hangs in the place of files while the others come; the second one need not be made any more."""
    put, hangs, goes_on = FileStore.put, threading.Event(), threading.Event()
    written: list[bytes] = []

    def slow(store: FileStore, key: Any, content: bytes, **said: Any) -> Any:
        if not written:
            hangs.set()
            assert goes_on.wait(60)
        written.append(content)
        return put(store, key, content, **said)

    monkeypatch.setattr(FileStore, "put", slow)
    store = FileStore(fsspec.filesystem("file"), str(tmp_path), codec=PLAIN, ttl_s=0, quota=10**6)
    named = NamedImages(store, lambda uuid, salt: False, MAX_BYTES)

    def parsed(color: int) -> list[NamedImage]:
        return [*named_images({"messages": [{"content": [image("a", picture(color=color))]}]})]

    async def ask(color: int) -> None:
        async with named.saving(parsed(color), None):
            pass

    async def ask_all() -> None:
        first = asyncio.create_task(ask(1))
        await asyncio.to_thread(hangs.wait, 60)
        others = [asyncio.create_task(ask(color)) for color in (2, 3)]
        await asyncio.sleep(0.01)  # both are begun
        goes_on.set()
        await asyncio.gather(first, *others)

    asyncio.run(ask_all())
    assert written == [picture(color=1), picture(color=3)]
    info = store.find_named(None, "a")
    assert info is not None
    assert store.read(None, info, "a") == picture(color=3)
