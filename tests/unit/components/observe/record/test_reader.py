# SPDX-License-Identifier: Apache-2.0
"""Readers of records: several servers behind one address."""

import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.page_app import add, filled, many
from vllm_mmcache.components.observe.record.reader import ServerReader
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
