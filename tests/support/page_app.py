# SPDX-License-Identifier: Apache-2.0
"""The page's routes over example records, served by uvicorn in a thread, to be stopped and started again."""

import json
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from mmcache_tools.harness.server import free_port
from starlette.applications import Starlette

from vllm_mmcache.base.lru import Budget
from vllm_mmcache.components.observe.page.web import routes
from vllm_mmcache.components.observe.record.schema import Record, from_json
from vllm_mmcache.components.observe.record.store import RecordStore
from vllm_mmcache.components.observe.record.summary import summary

EXAMPLES = [from_json(given) for given in json.loads(Path(__file__).with_name("example_records.json").read_text())]


IN_FORCE: dict[str, Any] = {
    "components": {
        "identity": {"state": "on", "reason": ""},
        "features": {"state": "mixed", "reason": "on in worker 0; off: <b>no</b> tower (worker 1)"},
        "observe": {"state": "off", "reason": "MMCACHE_OBSERVE=1 switches it on"},
    },
    "places": {"api": {"identity": {"state": "on", "reason": ""}}},
}


def many(count: int) -> list[Record]:
    """The examples over and over, three seconds apart, with ids of their own."""
    now = time.time()
    return [
        EXAMPLES[n % len(EXAMPLES)].model_copy(
            update={"id": f"5f3a91c2-{n}", "request_id": f"chatcmpl-{n:08x}", "time_s": now - 3 * (count - n)}
        )
        for n in range(count)
    ]


class RecordsMade:
    """Stands for `from_json`: how many records it has made, and the most of them that were held at a time."""

    def __init__(self) -> None:
        self.most = 0
        self._made: list[weakref.ref[Record]] = []

    def __len__(self) -> int:
        return len(self._made)

    def read(self, data: Any) -> Record:
        record = from_json(data)
        self._made.append(weakref.ref(record))
        self.most = max(self.most, sum(reference() is not None for reference in self._made))
        return record


def filled(records: Sequence[Record]) -> RecordStore:
    """A store with `records` in it and in its totals."""
    store = RecordStore(lambda: Budget(10_000, 1 << 30))
    for record in records:
        add(store, record)
    return store


def add(store: RecordStore, record: Record) -> None:
    facts = summary(record)
    store.count(record.prompt_tokens, record.reused_tokens, facts["missed_tokens"], facts["images"])
    store.add(record.id, 1000, record, record.request_id)


KEY = "the-admin-key-of-this-server"


class Server:
    """Serves `store` at `url`, with a key; stop() and start() as a server that is gone and comes back on its port."""

    def __init__(self, store: RecordStore | None, admin_key: str | None = KEY) -> None:
        self.store = store
        self._app = Starlette(routes=routes(lambda: self.store, admin_key, lambda: IN_FORCE))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.page = f"{self.url}/mmcache#key={admin_key}"
        self.start()

    def start(self) -> None:
        config = uvicorn.Config(self._app, port=self.port, log_level="warning", timeout_graceful_shutdown=10)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.02)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(120)
        assert not self._thread.is_alive()
