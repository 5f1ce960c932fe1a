# SPDX-License-Identifier: Apache-2.0
"""Two real servers with one place for files and one store, and the clients of OpenAI and Anthropic.

A file is uploaded at one, named at both, and answered alike; and what one knows of an image, the other one knows.
"""

import base64
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import anthropic
import httpx
import openai
import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached
from openai import OpenAI

from benchmarks.servers import counters
from benchmarks.strange_replica import ByTurns
from tests.support import files
from tests.support.sizes import scaled
from tests.support.store_server import PATIENCE_S, TIMEOUT_S, Server
from vllm_mmcache.client import OnceTransport
from vllm_mmcache.exactness.pictures import ellipses
from vllm_mmcache.metrics import table_sizes

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("files")]

MODEL = "zoo"
ARGS = (
    *CPU_ARGS,
    "--served-model-name",
    MODEL,
    "--limit-mm-per-prompt",
    '{"image": 4}',
    "--enable-prefix-caching",
    "--enable-scale-out",
)
TENANT = "X-Tenant"


CHAT = "/v1/chat/completions"
NOTHING_TO_SEE = {"messages": [{"role": "user", "content": "Nothing to see."}], "max_tokens": 1}
Saved = tuple[str, str]
"""A record or features, and the tier that they are saved in."""
Json = dict[str, Any]
Parts = tuple[Json, Json]
"""The part that names a file, and the part that holds the image."""


class Place(NamedTuple):
    """Where the files lie, and the addresses of the servers."""

    folder: Path
    urls: tuple[str, str]

    def client(self, replica: int, tenant: str = "alice") -> OpenAI:
        headers = {TENANT: tenant}
        return OpenAI(base_url=f"{self.urls[replica]}/v1", api_key="-", default_headers=headers, max_retries=0)

    def post(self, replica: int, path: str, body: dict[str, Any], tenant: str = "alice") -> httpx.Response:
        sent = {"model": MODEL, "temperature": 0, **body}
        return httpx.post(f"{self.urls[replica]}{path}", json=sent, headers={TENANT: tenant}, timeout=120)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, running_server: Server) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("files")
    model = build_cached("qwen3-vl", folder / "model")
    env = {
        "MMCACHE_FILES": str(folder / "files"),
        "MMCACHE_FILES_UUIDS": "1",
        "MMCACHE_TENANT_FROM": f"header:{TENANT}",
        "MMCACHE_STORE": running_server.url,
        "MMCACHE_STORE_REMOTE_TIMEOUT_S": str(TIMEOUT_S),
        "MMCACHE_STORE_WAIT_S": str(PATIENCE_S),
    }
    with ExitStack() as stack:
        logs = [folder / f"{number}.log" for number in range(2)]
        servers = [stack.enter_context(serve(model, log_path=log, env=env, args=ARGS)) for log in logs]
        yield Place(folder / "files", (servers[0].url, servers[1].url))


def picture(name: str) -> bytes:
    return files.saved(ellipses(name, (160, 120)), "PNG")


def upload(client: OpenAI, name: str) -> str:
    return client.files.create(file=(f"{name}.png", picture(name)), purpose="vision").id


class Way(NamedTuple):
    """A request about an image: the one that names its file, and the one that holds it."""

    path: str
    named: Json
    whole: Json


def ways(file_id: str = "", content: bytes = b"") -> dict[str, Way]:
    text = base64.b64encode(content).decode()
    url = f"data:image/png;base64,{text}"
    chat: Parts = {"type": "file", "file": {"file_id": file_id}}, {"type": "image_url", "image_url": {"url": url}}
    input_image = {"type": "input_image", "detail": "auto"}
    responses: Parts = {**input_image, "file_id": file_id}, {**input_image, "image_url": url}
    source = {"type": "base64", "media_type": "image/png", "data": text}
    block: Parts = (
        {"type": "image", "source": {"type": "file", "file_id": file_id}},
        {"type": "image", "source": source},
    )
    asked = {"type": "text", "text": "What is this?"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}

    def way(path: str, parts: Parts, request: Callable[[Json], Json]) -> Way:
        return Way(path, *map(request, parts))

    def result(part: Json) -> Json:
        return user({"type": "tool_result", "tool_use_id": "t", "content": [part]})

    return {
        "chat": way(CHAT, chat, lambda part: {"messages": [user(part, asked)], "max_tokens": 4, "logprobs": True}),
        "responses": way(
            "/v1/responses",
            responses,
            lambda part: {"input": [user({"type": "input_text", "text": "What?"}, part)], "max_output_tokens": 4},
        ),
        "messages": way("/v1/messages", block, lambda part: {"messages": [user(part, asked)], "max_tokens": 4}),
        "a tool's result": way(
            "/v1/messages", block, lambda part: {"messages": [user(asked), call, result(part)], "max_tokens": 4}
        ),
        "render": way(f"{CHAT}/render", chat, lambda part: {"messages": [user(part, asked)]}),
        "count": way("/v1/messages/count_tokens", block, lambda part: {"messages": [user(part)]}),
    }


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


CHANGES = ("id", "request_id", "created", "created_at", "completed_at", "usage", "cache_salt")


def lasting(answer: Any) -> Any:
    """An answer without times, random ids and what was cached."""
    if isinstance(answer, dict):
        return {name: lasting(value) for name, value in answer.items() if name not in CHANGES}
    return [lasting(one) for one in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("way", ways())
def test_a_named_file_is_answered_as_its_content(place: Place, way: str) -> None:
    file_id = upload(place.client(0), "a")
    path, named, whole = ways(file_id, picture("a"))[way]
    for replica in (1, 0):
        answers = [place.post(replica, path, body).raise_for_status().json() for body in (whole, named, named)]
        assert lasting(answers[1]) == lasting(answers[0])
        assert lasting(answers[2]) == lasting(answers[0])
    other = ways(upload(place.client(0), "b"), picture("b"))[way][1]
    assert lasting(place.post(1, path, other).json()) != lasting(answers[0]) or way == "count"


def test_a_known_file_is_neither_read_nor_decoded(place: Place) -> None:
    file_id = upload(place.client(0), "known")
    path, named, _ = ways(file_id)["chat"]
    first = place.post(0, path, named).raise_for_status().json()
    before = counters(place.urls[0])
    content = [one for one in place.folder.rglob("*") if one.is_file() and one.stat().st_size == len(picture("known"))]
    for one in content:
        one.rename(one.with_name("away"))
    try:
        again = place.post(0, path, named).raise_for_status().json()
    finally:
        for one in content:
            one.with_name("away").rename(one)
    assert len(content) == 1
    assert lasting(again) == lasting(first)
    assert counters(place.urls[0])["images_decoded"] == before["images_decoded"]


def test_content_that_is_lost_fails_its_request_alone(place: Place) -> None:
    file_id, other = (upload(place.client(0), name) for name in ("lost", "not lost"))
    for one in place.folder.rglob("*"):
        if one.is_file() and one.stat().st_size == len(picture("lost")):
            one.write_bytes(one.read_bytes()[:-1])
    path, named, _ = ways(file_id)["chat"]
    answer = place.post(1, path, named)
    assert answer.status_code == 400
    assert "upload it again" in answer.json()["error"]["message"]
    assert place.post(1, path, ways(other)["chat"][1]).status_code == 200
    assert upload(place.client(0), "lost") == file_id
    assert place.post(1, path, named).status_code == 200


def test_the_openai_client(place: Place) -> None:
    near, far = place.client(0, "carol"), place.client(1, "carol")
    file_id = upload(near, "mine")
    assert [one.id for one in far.files.list()] == [file_id]
    assert far.files.retrieve(file_id).filename == "mine.png"
    assert far.files.content(file_id).read() == picture("mine")
    with pytest.raises(openai.BadRequestError, match="no image"):
        near.files.create(file=("a.txt", b"text"), purpose="user_data")
    assert far.files.delete(file_id).deleted
    for client in (near, far):
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            client.files.retrieve(file_id)
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            client.responses.create(
                model=MODEL,
                input=[{"role": "user", "content": [{"type": "input_image", "file_id": file_id, "detail": "auto"}]}],
            )


@pytest.mark.parametrize("way", ways())
def test_a_foreign_file_is_as_unknown_as_any(place: Place, way: str) -> None:
    mine = upload(place.client(0), "secret")
    unknown = "file-" + "0" * 64
    path = ways()[way][0]
    answers = [place.post(1, path, ways(file_id)[way][1], tenant="mallory") for file_id in (mine, unknown)]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].text.replace(mine, "ID") == answers[1].text.replace(unknown, "ID")
    assert place.post(1, path, ways(mine)[way][1]).status_code == 200
    assert [one.id for one in place.client(1, "mallory").files.list()] == []


def test_a_replica_that_has_not_seen_an_image_does_nothing_again(place: Place) -> None:
    """It takes records and features from the store. The control: an image that nobody has seen."""
    done = "images_decoded", "items_processed", "tower_images"
    far = place.urls[1]
    found: dict[str, dict[str, float]] = {}
    for name in ("seen elsewhere", "unseen"):
        path, _, whole = ways(content=picture(f"{name} {uuid.uuid4()}"))["chat"]  # new to a second try of the test, too
        answer = None
        if name != "unseen":
            before = saved_by_now(place)
            answer = place.post(0, path, whole).raise_for_status().json()
            saved_by_now(place, before)
        did = counters(far)
        again = place.post(1, path, whole).raise_for_status().json()
        place.post(1, path, NOTHING_TO_SEE)
        found[name] = {what: counters(far)[what] - did[what] for what in done}
        assert answer is None or lasting(again) == lasting(answer)
    assert found == {"seen elsewhere": dict.fromkeys(done, 0.0), "unseen": dict.fromkeys(done, 1.0)}


def saved_by_now(place: Place, former: Mapping[Saved, int] | None = None) -> dict[Saved, int]:
    """What the first server has put where, once nothing waits to be written and nothing has come for a while.

    former: what it had put where before; it must have become more everywhere. A record that is put again while it waits
    is written once, so not everything that RAM takes is counted for the store.
    """
    until = time.monotonic() + 60
    last, since = dict[Saved, int](), 0.0
    while True:
        place.post(0, CHAT, NOTHING_TO_SEE).raise_for_status()  # a step, with which the engine tells what it has done
        text = httpx.get(f"{place.urls[0]}/metrics", timeout=30).text
        counted = re.findall(r'^mmcache:(record|features)_saved_total{\w+="(ram|remote)"} (\S+)$', text, re.MULTILINE)
        waiting = re.findall(r'^mmcache:.*table_entries{.*table="\w*waiting\w*"} (\S+)$', text, re.MULTILINE)
        now = {(what, tier): int(float(number)) for what, tier, number in counted}
        if now != last:
            last, since = now, time.monotonic()
        grown = former is None or all(now[each] > number for each, number in former.items())
        is_steady = time.monotonic() - since > table_sizes.SECONDS + 1  # what waits may be so old
        if grown and is_steady and waiting and not any(map(float, waiting)):
            return now
        assert time.monotonic() < until, (former, now, waiting)
        time.sleep(0.2)


def test_the_client_of_anthropic(place: Place) -> None:
    """It uploads at one replica, and names, lists and removes at the other."""
    clients = [
        anthropic.Anthropic(base_url=url, api_key="-", default_headers={TENANT: "claude"}, max_retries=0)
        for url in place.urls
    ]
    file = clients[0].beta.files.upload(file=("a.png", picture("a")), expires_in_seconds=3600)
    named = ways(file.id, picture("a"))["messages"].named
    said = clients[1].beta.messages.create(model=MODEL, betas=["files-api-2025-04-14"], **named)
    assert said.usage.output_tokens == 4
    assert [one.id for one in clients[1].beta.files.list()] == [file.id]
    assert clients[1].beta.files.retrieve_metadata(file.id) == file
    assert clients[1].beta.files.download(file.id).read() == picture("a")
    assert clients[1].beta.files.delete(file.id).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError):
        clients[0].beta.messages.create(model=MODEL, betas=["files-api-2025-04-14"], **named)


TURNS = scaled(8)


def test_turns_that_alternate_between_replicas_are_never_refused(place: Place) -> None:
    """The transport sends each image once: the other replica finds it by its uuid."""
    balancer = ByTurns(*place.urls)
    messages: list[Json] = []
    with httpx.Client(transport=cast("Any", OnceTransport(balancer)), timeout=120) as client:
        for turn in range(TURNS):
            url = f"data:image/png;base64,{base64.b64encode(picture(f'turn {turn % 3}')).decode()}"
            messages.append(
                user({"type": "text", "text": f"Turn {turn}?"}, {"type": "image_url", "image_url": {"url": url}})
            )
            body = {"model": MODEL, "messages": messages[-4:], "temperature": 0, "max_tokens": 4, "logprobs": True}
            answer = client.post(f"{place.urls[0]}{CHAT}", json=body, headers={TENANT: "alternating"})
            whole = place.post(turn % 2, CHAT, body, tenant="whole")
            assert lasting(answer.json()) == lasting(whole.json())
            messages.append({"role": "assistant", "content": f"Answer {turn}."})
    assert balancer.statuses == [200] * TURNS


def test_a_foreign_uuid_is_unknown(place: Place) -> None:
    def named(uuid: str, url: str | None) -> Json:
        part = {"type": "image_url", "image_url": {"url": url} if url else None, "uuid": uuid}
        return {"messages": [user(part)], "max_tokens": 1}

    url = f"data:image/png;base64,{base64.b64encode(picture('of alice')).decode()}"
    assert place.post(0, CHAT, named("mine", url)).status_code == 200
    assert place.post(1, CHAT, named("mine", None)).status_code == 200
    answers = [place.post(1, CHAT, named(uuid, None), tenant="mallory") for uuid in ("mine", "nobody's")]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert lasting(answers[0].json()) == lasting(answers[1].json())
