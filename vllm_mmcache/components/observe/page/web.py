# SPDX-License-Identifier: Apache-2.0
"""The page /mmcache and its JSON: records, one record, totals, components. Plain Starlette routes; no vLLM.

Runs in the API server, on its event loop. The page's own files hold nothing of anybody and are served to all; the JSON
tells of everybody's requests and asks for the admin key, which the clients of the server don't have.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from vllm_mmcache.components.observe.page.admin import MISSING
from vllm_mmcache.components.observe.record.schema import FEATURE_MEANINGS, MEANINGS, Record, to_json
from vllm_mmcache.components.observe.record.store import RecordStore
from vllm_mmcache.components.observe.record.summary import summary

FILES = {"page.js": "text/javascript", "page.css": "text/css"}
HEADERS = {
    # Nothing from outside, no inline script, in no other site's frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PRIVATE = {"Cache-Control": "no-store"}
OFF = "nothing is recorded: start with `mmcache serve MODEL --observe`, or set MMCACHE_OBSERVE=1"
MAX_RECORDS = 1000
MAX_WAIT_S = 2.0  # short, since a server that is told to stop waits for its open requests
POLL_S = 0.2
HERE = Path(__file__).parent

Endpoint = Callable[[Request], Awaitable[Response]]
Components = Callable[[], dict[str, Any]]
"""What is in force: components and places; see `as_json` of base/status.py."""


def routes(records: Callable[[], RecordStore | None], admin_key: str | None, components: Components) -> list[Route]:
    """The page and its JSON. records: gives the store, or None while nothing is recorded; components: what is in force.

    admin_key: what the JSON asks for; without one it tells nothing to anybody.
    """

    def allowed(request: Request, admin_key: str) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return bool(hmac.compare_digest(_digest(key), _digest(admin_key)) & (scheme.lower() == "bearer"))

    def guarded(answer: Callable[[Request], Awaitable[Any]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            if admin_key is None:
                return failure(403, MISSING)
            if not allowed(request, admin_key):
                return failure(401, "the admin key is missing or wrong")
            try:
                return JSONResponse(await answer(request), headers=PRIVATE)
            except Refused as refused:
                return failure(refused.status, str(refused))

        return endpoint

    def recorded(answer: Callable[[Request, RecordStore], Awaitable[Any]]) -> Endpoint:
        async def from_store(request: Request) -> Any:
            store = records()
            if store is None:
                why = components()["components"].get("observe", {}).get("reason")
                raise Refused(503, f"{OFF} (observe is off: {why})" if why else OFF)
            return await answer(request, store)

        return guarded(from_store)

    async def in_force(_: Request) -> dict[str, Any]:
        return components()

    async def totals(_: Request, store: RecordStore) -> dict[str, Any]:
        sums = await run_in_threadpool(store.totals)
        meanings = {str(reason): text for reason, text in MEANINGS.items()} | FEATURE_MEANINGS
        return {"totals": sums.model_dump(mode="json"), "meanings": meanings, **components()}

    return [
        Route("/mmcache", page, methods=["GET"]),
        Route("/mmcache/", to_page, methods=["GET"]),
        *(Route(f"/mmcache/{name}", static_file(name), methods=["GET"]) for name in FILES),
        Route("/mmcache/records", recorded(list_records), methods=["GET"]),
        Route("/mmcache/records/{record_id:path}", recorded(one_record), methods=["GET"]),
        Route("/mmcache/totals", recorded(totals), methods=["GET"]),
        Route("/mmcache/components", guarded(in_force), methods=["GET"]),
        Route("/mmcache/rooms", guarded(in_force), methods=["GET"]),  # the older name, gone in version 0.2
    ]


class Refused(Exception):
    """A request that can't be answered as asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def failure(status: int, message: str) -> JSONResponse:
    """An answer of JSON with `error` alone, which nobody may keep."""
    return JSONResponse({"error": message}, status_code=status, headers=PRIVATE)


def _digest(key: str) -> bytes:
    """What is compared: of one length, so that the time tells nothing of the key's, and of any characters."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


async def page(_: Request) -> Response:
    """The page itself, for everybody: it holds no record."""
    return FileResponse(HERE / "index.html", media_type="text/html", headers=HEADERS)


async def to_page(_: Request) -> Response:
    """From /mmcache/ to /mmcache."""
    return RedirectResponse("../mmcache")  # the page's own addresses are relative, so that a proxy may add a prefix


def static_file(name: str) -> Endpoint:
    """An endpoint that gives one of FILES to everybody."""

    async def endpoint(_: Request) -> Response:
        return FileResponse(HERE / name, media_type=FILES[name], headers=HEADERS)

    return endpoint


async def list_records(request: Request, store: RecordStore) -> dict[str, Any]:
    """Parameters: limit (100); since, a cursor: only what is newer; wait, seconds, with since; full, whole records.

    id: of these instead the record of that id, or else all whose requests carry it, newest first.
    """
    limit = max(1, int(number(request, "limit", 100, MAX_RECORDS)))
    wait_s = number(request, "wait", 0, MAX_WAIT_S)
    full = request.query_params.get("full", "0") in ("1", "true")
    if (name := request.query_params.get("id")) is not None:
        return {"records": await shown(await run_in_threadpool(store.named, name, limit), full)}
    cursor = request.query_params.get("since", "")
    deadline = time.monotonic() + (wait_s if cursor else 0)
    try:
        found, cursor = await run_in_threadpool(store.since, cursor, limit)
    except ValueError as error:
        raise Refused(400, f"since={error}") from None
    while not found and time.monotonic() < deadline and not await request.is_disconnected():
        await asyncio.sleep(POLL_S)
        found, cursor = await run_in_threadpool(store.since, cursor, limit)
    return {"records": await shown(found, full), "cursor": cursor}


async def shown(records: Sequence[Record], full: bool) -> list[dict[str, Any]]:
    """Whole records as JSON, or their summaries; made in a thread, so that the event loop stays free."""
    return await run_in_threadpool(lambda: [to_json(r) if full else summary(r) for r in records])


async def one_record(request: Request, store: RecordStore) -> dict[str, Any]:
    """The whole record whose id is in the path. Raises: Refused with 404 where the store has none."""
    record_id = request.path_params["record_id"]
    record = await run_in_threadpool(store.get, record_id)
    if record is None:
        raise Refused(404, f"no record {record_id!r}: it is unknown, or its record had to go for newer ones")
    return to_json(record)


def number(request: Request, name: str, default: float, most: float) -> float:
    """A parameter of the query, not above `most`. Raises: Refused with 400 for what is no number from 0 on."""
    text = request.query_params.get(name, str(default))
    try:
        value = float(text)
        if not 0 <= value < float("inf"):
            raise ValueError(text)
    except ValueError:
        raise Refused(400, f"{name}={text}: expected a number from 0 to {most:g}") from None
    return min(value, most)
