# SPDX-License-Identifier: Apache-2.0
"""`/v1/files` and the layer that puts files in their places, over an application that says what it was asked."""

import asyncio
import io
import itertools
import json
import logging
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import fsspec
import httpx
import pytest
import uvicorn
from PIL import Image
from prometheus_client import REGISTRY
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from vllm_mmcache.base import settings, tenant
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.components.identity.middleware import FindTenant
from vllm_mmcache.content import placeholders
from vllm_mmcache.files.endpoints import FileEndpoints, HideSalts
from vllm_mmcache.files.middleware import MOST_FILES, PutFilesMiddleware
from vllm_mmcache.files.store import ENTRY_BYTES, FileStore
from vllm_mmcache.metrics import counters
from vllm_mmcache.storage.encryption import PLAIN

CHAT, ANTHROPIC = "/v1/chat/completions", "/v1/messages"
MAX_BYTES, MAX_PIXELS = 50_000, 10_000


def picture(side: int = 20, kind: str = "PNG", color: int = 7) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (color, 0, 0)).save(file, kind)
    return file.getvalue()


async def echo(request: Request) -> JSONResponse:
    """The parsed request, and what the names in it stand for."""
    body = await request.body()
    names = [name for name in body.decode().replace('"', ",").split(",") if name.startswith(placeholders.PREFIX)]
    resolved = [placeholders.resolve(name) for name in names]
    try:
        shown = [{"content": one.decode().hex(), "id": one.content_id.hex()} for one in resolved if one is not None]
    except ValueError as error:  # as vLLM does
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)
    return JSONResponse({"body": body.decode(), "images": shown})


def application(folder: Path, source: tenant.TenantSource, takes_files: bool = True, quota: int = 10**6) -> TestClient:
    store = FileStore(fsspec.filesystem("file"), str(folder), codec=PLAIN, ttl_s=0, quota=quota)
    routes = FileEndpoints(store, max_bytes=MAX_BYTES, max_pixels=MAX_PIXELS).routes()
    layers = [
        Middleware(HideSalts),
        Middleware(FindTenant, source=source),
        Middleware(
            PutFilesMiddleware,
            store=store,
            may_name_files=(CHAT, ANTHROPIC).__contains__,
            takes_files=lambda scope, path: takes_files,
        ),
    ]
    asked = [Route(path, echo, methods=["POST"]) for path in (CHAT, ANTHROPIC, "/v1/rerank")]
    return TestClient(Starlette(routes=[*asked, *routes], middleware=layers))


@pytest.fixture(params=["cache_salt", "header:x-tenant"])
def source(request: pytest.FixtureRequest) -> tenant.TenantSource:
    return tenant.parse_source(request.param)


@pytest.fixture
def client(tmp_path: Path, source: tenant.TenantSource) -> Iterator[TestClient]:
    yield application(tmp_path, source)
    assert placeholders.size().entries == 0


class Tenant:
    """A client of one tenant, who says who it is as the source wants it."""

    def __init__(self, client: TestClient, source: tenant.TenantSource, name: str | None = None) -> None:
        self._client = client
        self._headers = {"x-tenant": name} if name and source.is_gateway else {}
        self._field = {"cache_salt": name} if name and not source.is_gateway else {}

    def upload(self, content: bytes, name: str = "a.png", purpose: str = "vision", **fields: str) -> Any:
        data = {"purpose": purpose, **self._field, **fields}
        return self._client.post("/v1/files", files={"file": (name, content)}, data=data, headers=self._headers)

    def call(self, method: str, path: str = "", **params: Any) -> Any:
        wanted = {**self._field, **params}
        return self._client.request(method, f"/v1/files{path}", params=wanted, headers=self._headers)

    def chat(self, *ids: str, path: str = CHAT) -> Any:
        if path == ANTHROPIC:
            content = [{"type": "image", "source": {"type": "file", "file_id": one}} for one in ids]
        else:
            content = [{"type": "file", "file": {"file_id": one}} for one in ids]
        body = {"messages": [{"role": "user", "content": content}], **self._field}
        return self._client.post(path, json=body, headers=self._headers)


@pytest.fixture
def alice(client: TestClient, source: tenant.TenantSource) -> Tenant:
    return Tenant(client, source, "alice")


@pytest.fixture
def bob(client: TestClient, source: tenant.TenantSource) -> Tenant:
    return Tenant(client, source, "bob")


def message(answer: Any) -> str:
    return str(answer.json()["error"]["message"])


def test_uploaded_listed_read_and_deleted(alice: Tenant) -> None:
    uploaded = alice.upload(picture(), "holiday.png").raise_for_status().json()
    assert (uploaded["object"], uploaded["bytes"], uploaded["filename"]) == ("file", len(picture()), "holiday.png")
    assert (uploaded["purpose"], uploaded["status"]) == ("vision", "processed")
    path = f"/{uploaded['id']}"
    assert alice.call("GET", path).json() == uploaded
    listed = alice.call("GET").json()
    assert (listed["object"], listed["data"], listed["has_more"]) == ("list", [uploaded], False)
    content = alice.call("GET", f"{path}/content")
    assert (content.content, content.headers["content-type"]) == (picture(), "image/png")
    assert alice.call("DELETE", path).json() == {"id": uploaded["id"], "object": "file", "deleted": True}
    for method, below in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert alice.call(method, path + below).status_code == 404


def test_pages_of_the_list(alice: Tenant) -> None:
    ids = [alice.upload(picture(color=color), purpose="user_data").json()["id"] for color in range(4)]
    pages: list[list[str]] = []
    after: dict[str, str] = {}
    while True:
        page = alice.call("GET", limit=3, order="asc", **after).json()
        pages.append([one["id"] for one in page["data"]])
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert [len(page) for page in pages] == [3, 1]
    assert sorted(itertools.chain(*pages)) == sorted(ids)
    assert alice.call("GET", purpose="vision").json()["data"] == []
    assert alice.call("GET", after="file-x").status_code == 404
    for limit in ("0", "-1", "x", "10001"):
        assert alice.call("GET", limit=limit).status_code == 400


def test_the_form_of_anthropic(client: TestClient, source: tenant.TenantSource) -> None:
    alice = Tenant(client, source, "alice")
    alice._headers = {**alice._headers, "anthropic-version": "2023-06-01"}
    data = {**alice._field, "expires_in_seconds": "7776000"}
    sent = client.post("/v1/files", files={"file": ("a.png", picture())}, data=data, headers=alice._headers)
    uploaded = sent.raise_for_status().json()
    assert (uploaded["type"], uploaded["mime_type"], uploaded["size_bytes"]) == ("file", "image/png", len(picture()))
    created, expires = (datetime.fromisoformat(uploaded[name]) for name in ("created_at", "expires_at"))
    assert (expires - created).total_seconds() == 7776000
    others = [alice.upload(picture(color=color)).json()["id"] for color in range(2)]
    path = f"/{uploaded['id']}"
    assert alice.call("GET", path).json() == uploaded
    for cursor in ("page", "after_id"):
        first = alice.call("GET", limit=2).json()
        after = first["next_page"] if cursor == "page" else first["last_id"]
        second = alice.call("GET", limit=2, **{cursor: after}).json()
        assert {one["id"] for page in (first, second) for one in page["data"]} == {uploaded["id"], *others}
        assert (len(second["data"]), second["has_more"], second["next_page"]) == (1, False, None)
    assert [one["id"] for one in alice.call("GET", ids=others[0]).json()["data"]] == others[:1]
    refused = [alice.call("GET", limit=1001), alice.call("GET", before_id=others[0]), alice.upload(b"no image")]
    for answer in refused:
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert alice.call("DELETE", path).json() == {"id": uploaded["id"], "type": "file_deleted"}
    gone = alice.call("GET", path)
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "not_found_error")


def test_requests_are_counted(alice: Tenant, tmp_path: Path) -> None:
    def counted() -> dict[str, float]:
        found = [sample for family in REGISTRY.collect() for sample in family.samples]
        return {
            "/".join(sample.labels.values()): sample.value
            for sample in found
            if sample.name in ("mmcache:file_requests_total", "mmcache:files_named_total")
        }

    counters.register()
    before = counted()
    file_id = alice.upload(picture()).json()["id"]
    alice.upload(b"no image")
    alice.chat(file_id, file_id)
    alice.chat("file-x")
    alice.call("GET", f"/{file_id}")
    alice.call("DELETE", f"/{file_id}")
    shutil.rmtree(tmp_path / "v1")
    (tmp_path / "v1").write_text("no directory any more")
    alice.call("GET")
    alice.chat(file_id)
    grown = {name: number - before.get(name, 0) for name, number in counted().items()}
    assert {name: number for name, number in grown.items() if number} == {
        "create/done": 1,
        "create/refused": 1,
        "name/done": 1,
        "name/refused": 1,
        "name/failed": 1,
        "file_id": 2,
        "retrieve/done": 1,
        "delete/done": 1,
        "list/failed": 1,
    }


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
def test_a_request_names_files(alice: Tenant, path: str) -> None:
    contents = [picture(color=1), picture(kind="JPEG", color=2)]
    ids = [alice.upload(content).json()["id"] for content in contents]
    answer = alice.chat(*ids, ids[0], path=path).raise_for_status().json()
    assert [bytes.fromhex(one["content"]) for one in answer["images"]] == [*contents, contents[0]]
    assert [f"file-{one['id']}" for one in answer["images"]] == [*ids, ids[0]]
    assert "file_id" not in answer["body"]
    assert answer["body"].count("image/jpeg") == 1


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
def test_foreign_deleted_and_unknown_files_look_the_same(alice: Tenant, bob: Tenant, path: str) -> None:
    deleted, foreign = (one.upload(picture()).json()["id"] for one in (bob, alice))
    bob.call("DELETE", f"/{deleted}")
    unknown = "file-" + "0" * 64
    answers = [bob.chat(file_id, path=path) for file_id in (deleted, foreign, unknown)]
    assert [answer.status_code for answer in answers] == [404] * 3
    texts = [
        answer.text.replace(file_id, "ID") for answer, file_id in zip(answers, (deleted, foreign, unknown), strict=True)
    ]
    assert len(set(texts)) == 1
    assert "POST /v1/files" in message(answers[0])
    assert ("type" in answers[0].json()) == (path == ANTHROPIC)
    for method in ("GET", "DELETE"):
        assert bob.call(method, f"/{foreign}").text.replace(foreign, "ID") == bob.call(
            method, f"/{unknown}"
        ).text.replace(unknown, "ID")
    assert alice.chat(foreign, path=path).status_code == 200
    assert bob.call("GET").json()["data"] == []


def test_what_names_no_file_goes_on_as_it_came(client: TestClient) -> None:
    for path, body in (
        (CHAT, b'{"messages":  [{"content": "file_id"}]}'),
        (CHAT, b'{"file_id": not json'),
        (CHAT, b'["file_id"]'),
        (CHAT, b"[" * 100_000 + b'"file_id"'),
        ("/v1/rerank", b'{"messages": [{"content": [{"type": "file", "file": {"file_id": "a"}}]}]}'),
    ):
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.json() == {"body": body.decode(), "images": []}


def test_uploads_that_are_refused(alice: Tenant, client: TestClient) -> None:
    cases = {
        "no image": (alice.upload(b"GIF89a? no"), 400, "no image"),
        "no content": (alice.upload(b""), 400, "no"),
        "a bomb": (alice.upload(picture(side=101)), 400, "101x101 pixels"),
        "too large": (alice.upload(picture() + bytes(MAX_BYTES)), 413, "MMCACHE_FILE_BYTES"),
        "much too large": (alice.upload(picture() + bytes(MAX_BYTES * 9)), 413, "MMCACHE_FILE_BYTES"),
        "another purpose": (alice.upload(picture(), purpose="fine-tune"), 400, "'fine-tune'"),
        "no file": (client.post("/v1/files", data={"purpose": "vision"}), 400, "'file'"),
        "no form": (client.post("/v1/files", json={"purpose": "vision"}), 400, "'file'"),
        "expires too soon": (alice.upload(picture(), **{"expires_after[seconds]": "5"}), 400, "3600"),
    }
    for case, (answer, status, text) in cases.items():
        assert (case, answer.status_code) == (case, status)
        assert text in message(answer)
    assert alice.call("GET").json()["data"] == []
    broken = client.post(
        "/v1/files", content=b"--x\r\nbroken", headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert broken.status_code == 400
    expires = alice.upload(picture(), **{"expires_after[seconds]": "3600"}).json()
    assert expires["expires_at"] - expires["created_at"] == 3600


def test_a_body_that_is_too_large_is_not_read_to_its_end(client: TestClient) -> None:
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    pieces = iter([head, *[bytes(MAX_BYTES)] * 100])
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "headers": headers}
    asyncio.run(cast("Any", client.app(scope, receive, send)))
    assert sent[0]["status"] == 413
    assert b"MMCACHE_FILE_BYTES" in sent[1]["body"]
    assert len(list(pieces)) > 90


def test_quota(tmp_path: Path, source: tenant.TenantSource) -> None:
    alice = Tenant(application(tmp_path, source, quota=ENTRY_BYTES + 1000), source, "alice")
    first = alice.upload(picture()).json()
    refused = alice.upload(picture(color=8))
    assert refused.status_code == 413
    assert "Delete some first" in message(refused)
    alice.call("DELETE", f"/{first['id']}")
    assert alice.upload(picture(color=8)).status_code == 200


def test_a_server_that_can_not_take_files(tmp_path: Path, source: tenant.TenantSource) -> None:
    alice = Tenant(application(tmp_path, source, takes_files=False), source, "alice")
    answer = alice.chat(alice.upload(picture()).json()["id"])
    assert answer.status_code == 400
    assert "Send the image itself" in message(answer)


def test_too_many_files_and_files_that_are_no_more(alice: Tenant, tmp_path: Path) -> None:
    assert alice.chat(*(f"file-{number}" for number in range(MOST_FILES + 1))).status_code == 400
    file_id = alice.upload(picture()).json()["id"]
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.unlink()
    for answer, status in (alice.call("GET", f"/{file_id}/content"), 404), (alice.chat(file_id), 400):
        assert answer.status_code == status
        assert "is gone: upload it again" in message(answer)


def test_a_place_that_does_not_serve(alice: Tenant, tmp_path: Path) -> None:
    file_id = alice.upload(picture()).json()["id"]
    shutil.rmtree(tmp_path / "v1")
    (tmp_path / "v1").write_text("no directory any more")
    for answer in (alice.chat(file_id), alice.call("GET", f"/{file_id}"), alice.upload(picture())):
        assert (answer.status_code, message(answer)) == (503, "files can't be reached now: ask again later")


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
def test_a_place_that_fails_when_a_file_is_read(alice: Tenant, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """After it was found: vLLM has the request already, and its answer, 400, would keep clients from asking again."""
    file_id = alice.upload(picture()).json()["id"]

    def fail(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(FileStore, "_read", fail)
    answer = alice.chat(file_id, path=path)
    assert (answer.status_code, message(answer)) == (503, "files can't be reached now: ask again later")
    assert ("type" in answer.json()) == (path == ANTHROPIC)


def test_a_name_that_utf_8_has_not(client: TestClient) -> None:
    """A client may say in which characters a form is, and it may be ones that nothing can write down."""
    fields = [b'name="purpose"\r\n\r\nvision', b'name="file"; filename="a\\ud800"\r\n\r\n' + picture()]
    parts = [b"--x\r\ncontent-disposition: form-data; " + one + b"\r\n" for one in fields]
    kind = "multipart/form-data; boundary=x; charset=unicode_escape"
    for _ in range(2):
        answer = client.post("/v1/files", content=b"".join(parts) + b"--x--", headers={"content-type": kind})
        assert (answer.status_code, answer.json()["filename"]) == (200, "a?")


def test_the_salt_is_in_a_header_or_in_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = application(tmp_path, tenant.parse_source("cache_salt"))
    alice = Tenant(client, tenant.parse_source("cache_salt"), "alice")
    path = f"/v1/files/{alice.upload(picture()).json()['id']}"
    header = {"X-Cache-Salt": "alice"}
    in_header: dict[str, Any] = {"headers": header}
    in_url: dict[str, Any] = {"params": {"cache_salt": "alice"}}
    for given in (in_header, in_url | in_header):
        assert [client.get(one, **given).status_code for one in (path, path + "/content")] == [200, 200]
        assert len(client.get("/v1/files", **given).json()["data"]) == 1
    for other in ({"X-Cache-Salt": "bob"}, {}):
        assert client.get(path, headers=other).status_code == client.delete(path, headers=other).status_code == 404
    twice = [("X-Cache-Salt", "alice"), ("X-Cache-Salt", "bob")]
    wrong: list[tuple[list[str], Any]] = [(["bob"], header), (["alice", "bob"], {}), ([], twice)]
    for salts, headers in wrong:
        answer = client.delete(path, params={"cache_salt": salts}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
    assert client.delete(path, headers=header).status_code == 200
    form: dict[str, Any] = {"files": {"file": ("a.png", picture())}, "data": {"purpose": "vision"}}
    for given in (in_header, in_url):
        uploaded = client.post("/v1/files", **form, **given).json()["id"]
        assert client.get(f"/v1/files/{uploaded}").status_code == 404, "it is not everybody's"
        assert client.delete(f"/v1/files/{uploaded}", headers=header).status_code == 200
    form["data"]["cache_salt"] = "bob"
    assert client.post("/v1/files", **form, headers=header).status_code == 400


def test_a_salt_in_a_header_is_utf_8(tmp_path: Path) -> None:
    """As it is in JSON, which the same client's chats are."""
    client = application(tmp_path, tenant.parse_source("cache_salt"))
    file_id = Tenant(client, tenant.parse_source("cache_salt"), "m\xfcller").upload(picture()).json()["id"]

    async def ask(salt: bytes) -> int:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://files") as raw:
            return (await raw.get(f"/v1/files/{file_id}", headers=[(b"X-Cache-Salt", salt)])).status_code

    assert [asyncio.run(ask("m\xfcller".encode(encoding))) for encoding in ("utf-8", "latin-1")] == [200, 400]


def test_lists_of_one_tenant_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody keeps the others from theirs."""
    app = application(tmp_path, tenant.parse_source("cache_salt")).app
    running, most = Counter[bytes | None](), Counter[bytes | None]()

    def list_slowly(store: FileStore, key: bytes | None) -> list[Any]:
        running[key] += 1
        most[key] = max(most[key], running[key])
        time.sleep(0.05)
        running[key] -= 1
        return []

    monkeypatch.setattr(FileStore, "files_of", list_slowly)

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://files") as client:
            names = ["alice"] * 6 + ["bob", "carol"]
            answers = [client.get("/v1/files", headers={"X-Cache-Salt": name}) for name in names]
            return [answer.status_code for answer in await asyncio.gather(*answers)]

    assert asyncio.run(ask()) == [200] * 8
    assert [*most.values()] == [1, 1, 1]


def test_an_upload_is_written_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files is not encrypted."""
    source = tenant.parse_source("cache_salt")
    store = FileStore(fsspec.filesystem("file"), str(tmp_path), codec=PLAIN, ttl_s=0, quota=10**7)
    routes = FileEndpoints(store, max_bytes=3 << 20, max_pixels=MAX_PIXELS).routes()
    client = TestClient(Starlette(routes=routes, middleware=[Middleware(FindTenant, source=source)]))
    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", lambda self: pytest.fail("it is on disk"))
    content = picture() + bytes(2 << 20)
    request = client.build_request("POST", "/v1/files", files={"file": ("a.png", content)}, data={"purpose": "vision"})
    request.headers["content-type"] = request.headers["content-type"].replace("multipart", "Multipart")
    assert client.send(request).json()["bytes"] == len(content)


def test_the_access_log_has_no_salt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of uvicorn itself, which vLLM runs."""
    app = application(tmp_path, tenant.parse_source("cache_salt")).app
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with caplog.at_level(logging.INFO, "uvicorn.access"), socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/files"
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
            data, salt = {"purpose": "vision", "cache_salt": "a-secret"}, {"cache_salt": "a-secret", "limit": "7"}
            file_id = client.post(url, files={"file": ("a.png", picture())}, data=data).json()["id"]
            for method, below in ("GET", ""), ("GET", f"/{file_id}"), ("GET", f"/{file_id}/content"), ("DELETE", "/x"):
                client.request(method, url + below, params=salt)
            client.post(url, files={"file": ("a.png", picture())}, params=salt)
            listed = client.get(f"{url}/", params=salt, follow_redirects=True).json()
            client.put(url, params=salt)
            client.get(f"{url}/x/nothing", params=salt)
            client.get(url.replace("/v1", "//v1"), params=salt)
        server.should_exit = True
        thread.join(10)
    assert caplog.text.count("limit=7") == 9, "what is no secret is there"
    assert [one["id"] for one in listed["data"]] == [file_id]
    assert "a-secret" not in caplog.text


def test_a_tenant_is_required(client: TestClient, source: tenant.TenantSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", Settings(require_tenant=True))
    nobody = Tenant(client, source)
    for answer in (nobody.upload(picture()), nobody.call("GET"), nobody.chat("file-" + "0" * 64)):
        assert answer.status_code == 400
        assert "tenant" in message(answer)


def test_an_empty_salt_names_no_tenant(tmp_path: Path) -> None:
    """vLLM refuses it, too. Otherwise a client that has lost its salt would be among all those without one."""
    client = application(tmp_path, tenant.parse_source("cache_salt"))
    data = {"purpose": "vision", "cache_salt": ""}
    uploaded = client.post("/v1/files", files={"file": ("a.png", picture())}, data=data)
    for answer in uploaded, client.get("/v1/files", params={"cache_salt": ""}):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"
        assert "is empty" in answer.json()["error"]["message"]


def test_images_are_those_that_vllm_opens(tmp_path: Path) -> None:
    """By its formats, and by the number of pixels, which 0 does not bound."""
    store = FileStore(fsspec.filesystem("file"), str(tmp_path), codec=PLAIN, ttl_s=0, quota=10**6)
    routes = FileEndpoints(store, max_bytes=MAX_BYTES, max_pixels=0, formats=("PNG", "JPEG")).routes()
    alice = Tenant(TestClient(Starlette(routes=routes)), tenant.parse_source("cache_salt"))
    statuses = [alice.upload(picture(101, kind)).status_code for kind in ("PNG", "JPEG", "GIF", "PPM")]
    assert statuses == [200, 200, 400, 400]


def test_a_body_that_contradicts_the_header(tmp_path: Path) -> None:
    client = application(tmp_path, tenant.parse_source("header:x-tenant"))
    answer = client.get("/v1/files", params={"cache_salt": "bob"}, headers={"x-tenant": "alice"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
    assert client.get("/v1/files", headers=[("x-tenant", "a"), ("x-tenant", "b")]).status_code == 400


def test_json_is_as_it_was(alice: Tenant) -> None:
    """What a client says beside the file reaches the application with the same values."""
    file_id = alice.upload(picture()).json()["id"]
    more = {"text": "ä\U0001f600\u2028", "number": 1e-7, "big": 2**70, "none": None}
    body = {"messages": [{"content": [{"type": "file", "file": {"file_id": file_id}, **more}]}], **alice._field}
    answer = alice._client.post(CHAT, json=body, headers=alice._headers).raise_for_status()
    (part,) = json.loads(answer.json()["body"])["messages"][0]["content"]
    assert {name: part[name] for name in more} == json.loads(json.dumps(more))
