# SPDX-License-Identifier: Apache-2.0
"""How full each table is, and how full it may become, on vLLM's own /metrics. Any process, any thread.

A table is named once, with a function that looks at it; no request counts anything. A thread of each API server looks
every few seconds: with several of them a scrape asks one, and must find what all have. An engine looks when it sends
its statistics, once a second at most, and what has changed travels with these. It must never fail a request.
"""

import threading
import time
from collections.abc import Callable, Iterator
from inspect import ismethod
from typing import Any, Literal
from weakref import WeakMethod

from vllm_mmcache.base import status
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Size

SECONDS = 5.0
ENGINE_SECONDS = 1.0
PREFIX = "size/"  # of what travels


Measure = Callable[[], Size]
_Found = Callable[[], Measure | None]

_MEANINGS = {
    "entries": "Entries of a table.",
    "bytes": "Bytes that a table takes.",
    "budget_bytes": "Bytes that a table may take.",
}


class _Shown:
    """The three gauges of tables. `mode` is how prometheus joins several API servers."""

    def __init__(self, prefix: str, labels: tuple[str, ...], mode: Literal["livesum", "mostrecent"]) -> None:
        self._prefix = prefix
        self._labels = labels
        self._mode = mode
        self._gauges: dict[str, Any] = {}
        self._lock = threading.Lock()

    def show(self, what: str, size: float, *values: str) -> None:
        with self._lock:
            if what not in self._gauges:
                import prometheus_client

                self._gauges[what] = prometheus_client.Gauge(
                    f"mmcache:{self._prefix}_{what}", _MEANINGS[what], self._labels, multiprocess_mode=self._mode
                )
        self._gauges[what].labels(*values).set(size)


_server: dict[str, _Found] = {}
_engine: dict[str, _Found] = {}
_of_servers = _Shown("table", ("table",), "livesum")
_of_engines = _Shown("engine_table", ("table", "engine"), "mostrecent")
_sent: dict[str, int] = {}
_sent_s = -ENGINE_SECONDS
_thread: threading.Thread | None = None


def of_server(table: str, measure: Measure) -> None:
    """Name a table of the API server. A method does not keep its object alive; the last of a name is looked at."""
    _server[table] = _found(measure)


def of_engine(table: str, measure: Measure) -> None:
    """The same of the engine."""
    _engine[table] = _found(measure)


def show() -> None:
    """Show this API server's tables as they are now."""
    for table, size in _look(_server):
        for what, number in size._asdict().items():
            if number is not None:
                _of_servers.show(what, number, table)


def keep_shown() -> None:
    """Show this API server's tables from now on."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_show_forever, name="mmcache-sizes", daemon=True)
        _thread.start()


def take_changed() -> dict[str, int]:
    """What has changed of an engine's tables since it was taken last; scheduler thread."""
    global _sent_s
    now = time.monotonic()
    if now - _sent_s < ENGINE_SECONDS or not status.is_on("metrics"):
        return {}
    _sent_s = now
    with failsafe("sizes"):
        seen = {
            f"{PREFIX}{table}/{what}": int(number)  # vLLM sends no other kind of int, as of a setting
            for table, size in _look(_engine)
            for what, number in size._asdict().items()
            if number is not None
        }
        changed = {name: number for name, number in seen.items() if _sent.get(name) != number}
        _sent.update(changed)
        return changed
    return {}


def send_again() -> None:
    """What was sent reached nobody: the next time all sizes are taken as changed. Engine process."""
    global _sent_s
    _sent.clear()
    _sent_s = -ENGINE_SECONDS


def show_changed(name: str, number: int, engine: int) -> None:
    """Show what an engine has sent; what only a newer one knows is left out. API server."""
    _, table, what = name.split("/")
    if what in _MEANINGS:
        _of_engines.show(what, number, table, str(engine))


def _show_forever() -> None:
    while True:
        with failsafe("sizes"):
            show()
        time.sleep(SECONDS)


def _look(tables: dict[str, _Found]) -> Iterator[tuple[str, Size]]:
    for table, found in tuple(tables.items()):
        measure = found()
        if measure is not None:
            yield table, measure()


def _found(measure: Measure) -> _Found:
    return WeakMethod(measure) if ismethod(measure) else lambda: measure
