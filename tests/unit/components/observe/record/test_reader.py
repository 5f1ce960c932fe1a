# SPDX-License-Identifier: Apache-2.0
"""Readers of records: several servers behind one address, what is no server of ours, and how much is held of a file."""

import itertools
import json
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.page_app import EXAMPLES, RecordsMade, add, filled, many
from vllm_mmcache.base.errors import RecordsError
from vllm_mmcache.components.observe.record import file, reader
from vllm_mmcache.components.observe.record.file import BATCH_RECORDS
from vllm_mmcache.components.observe.record.reader import FileReader, ServerReader
from vllm_mmcache.components.observe.record.schema import Record, to_json


class InTurn(ServerReader):
    """Asks several servers in turn, as one address of several API servers does."""

    def __init__(self, servers: list[Any]) -> None:
        super().__init__("http://in-turn", None)
        self._servers = itertools.cycle(servers)

    def _get(self, path: str) -> dict[str, Any]:
        query = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
        store, limit = next(self._servers), int(query["limit"])
        records, cursor = store.since(query["since"], limit) if "since" in query else store.since("", limit)
        return {"records": [to_json(record) for record in records], "cursor": cursor}


def ids(records: Iterator[Record], num: int) -> list[str]:
    return [record.id for record in itertools.islice(records, num)]


def test_several_servers_show_each_request_once() -> None:
    records = many(31)
    servers = [filled(records[:-1:2]), filled(records[1:-1:2])]
    following = InTurn(servers).follow(5)
    listed = [record.id for record in records[20:30:2]]
    assert ids(following, 5) == listed
    # Of the other server, what is not older than the list; what each of them has before is not news.
    assert ids(following, 5) == [record.id for record in records[21:30:2]]
    add(servers[0], records[30])
    assert ids(following, 1) == [records[30].id]
    # One that has waited for long is news, too.
    waited = records[0].model_copy(update={"id": "waited"})
    add(servers[1], waited)
    assert ids(following, 1) == ["waited"]


def http(body: str, more: int = 0, status: str = "200 OK") -> bytes:
    """An answer whose header promises `more` bytes than come."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) + more}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"-ERR \x1b[1m unknown command\r\n", r"no answer from http://127.0.0.1:\d+: BadStatusLine: -ERR \\x1b"),
        (http('{"records": []', more=99), "no answer from .*: IncompleteRead"),
        (http("no JSON"), "no answer from "),
        (http('{"status": "ok"}'), "answered with no records: is it a vLLM server with mmcache?"),
        (http('{"records": 3}'), "answered with no records"),
        (http('{"records": [], "cursor": null}'), "answered with no cursor"),
        (http("[]"), "answered with no records"),
        (http("no", more=99, status="404 Not Found"), r"has no /mmcache \(status 404\)"),
    ],
)
def test_what_is_no_server_of_ours_is_named(answer: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(RecordsError, match=said):
            next(ServerReader(f"http://127.0.0.1:{listening.getsockname()[1]}", None).follow(1))
        thread.join(60)


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(RecordsError, match=r"no answer from http://127.0.0.1:8000 x: InvalidURL"):
        ServerReader("http://127.0.0.1:8000 x", None).newest(1)


def test_what_is_not_asked_for_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be larger than memory; of its records only those that are shown are held."""
    made: list[weakref.ref[Record]] = []
    most = 0

    def read(path: Path) -> Iterator[Record]:
        nonlocal most
        for number in range(50):
            record = EXAMPLES[0].model_copy(update={"id": f"r{number}", "request_id": f"chatcmpl-{number % 25}"})
            made.append(weakref.ref(record))
            most = max(most, sum(reference() is not None for reference in made))
            yield record

    monkeypatch.setattr(reader, "read_records", read)
    source = FileReader(Path("records.jsonl"))
    assert [record.id for record in source.newest(2)] == ["r48", "r49"]
    assert [record.id for record in source.named("r7")] == ["r7"]
    assert [record.id for record in source.named("chatcmpl-7")] == ["r32", "r7"]
    with pytest.raises(RecordsError, match="no record 'none' in it"):
        source.named("none")
    assert most <= 5


def lines_of(records: list[Record]) -> str:
    return "".join(json.dumps(to_json(record)) + "\n" for record in records)


def test_following_a_file_reads_each_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds no more of it than a batch and those that are shown."""
    monkeypatch.setattr(reader, "POLL_S", 0)
    path, records = tmp_path / "records.jsonl", many(4 * BATCH_RECORDS + 1)
    path.write_text(lines_of(records[:-1]))
    made = RecordsMade()
    monkeypatch.setattr(file, "from_json", made.read)
    following = FileReader(path).follow(5)
    assert ids(following, 5) == [record.id for record in records[-6:-1]]
    with path.open("a") as appended:
        appended.write(lines_of(records[-1:]))
    assert ids(following, 1) == [records[-1].id]
    assert len(made) == len(records)
    assert made.most <= 2 * BATCH_RECORDS + 5


def test_following_a_file_says_what_is_wrong_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "records.jsonl"
    with pytest.raises(RecordsError, match="No such file"):
        next(FileReader(path).follow(1))
    path.write_text("{}\n")
    with pytest.raises(RecordsError, match="line 1: not a record"):
        next(FileReader(path).follow(1))
    assert not caplog.text
    with path.open("a") as appended:
        appended.write(lines_of(EXAMPLES))
    assert ids(FileReader(path).follow(2), 2) == [record.id for record in EXAMPLES[-2:]]
    assert "line 1: not a record" in caplog.text
