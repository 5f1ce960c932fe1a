# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with a server of Redis: nobody listens, it hangs, gives its bytes slowly, is no Redis, or dies."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from tests.support.packages import BUDGET_BYTES
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.redis_nodes import LONGEST_REST_S, RedisEntry
from vllm_mmcache.storage.tier import Tier


def remote_tier(url: str, kind: Kind = FEATURES, timeout_s: float = 0.02, rest_s: float = 5.0) -> Tier:
    """A tier that waits no longer than a server of users' does; its entries live for 100 seconds."""
    backend = RedisBackend(url, kind, ttl_s=100, timeout_s=timeout_s, max_bytes=BUDGET_BYTES)
    return Tier(kind, backend, rest_s=(rest_s, max(rest_s, LONGEST_REST_S)))


@contextmanager
def refusing() -> Iterator[str]:
    """The URL of a port where nobody listens, nor will while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def server_that(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """The URL of a TCP server that treats each connection with `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=treat, args=(connection,), daemon=True).start()

        def treat(connection: socket.socket) -> None:
            with connection:
                try:
                    answer(connection)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def trickling(
    stored: bytes, part_bytes: int, part_s: float, expire: bytes = b":1\r\n", is_late: bool = False
) -> Callable[[socket.socket], object]:
    """A server that has `stored` under every key, and gives it slowly.

    expire: its answer to EXPIRE. is_late: whether that comes with the answer to the next question alone.
    """

    def answer(connection: socket.socket) -> None:
        owed = b""
        while request := connection.recv(4096):
            if b"EXPIRE" in request:
                owed = expire if is_late else b""
                connection.sendall(b"" if is_late else expire)
                continue
            connection.sendall(owed)
            owed = b""
            if b"STRLEN" in request:
                connection.sendall(b":%d\r\n" % len(stored))
            elif b"GETRANGE" in request:
                start, end = (int(number) for number in request.split(b"\r\n")[-4::2])
                asked = stored[start : end + 1]
                connection.sendall(b"$%d\r\n" % len(asked))
                for at in range(0, len(asked), part_bytes):
                    time.sleep(part_s)
                    connection.sendall(asked[at : at + part_bytes])
                connection.sendall(b"\r\n")
            else:
                connection.sendall(b"+OK\r\n" * request.count(b"*"))

    return answer


def between(monkeypatch: pytest.MonkeyPatch, what: Callable[[int], object]) -> None:
    """Run `what` before each read of a value, with the offset."""
    read_into = RedisEntry.read_into

    def instead(self: RedisEntry, offset: int, buffer: memoryview, until: float) -> None:
        what(offset)
        read_into(self, offset, buffer, until)

    monkeypatch.setattr(RedisEntry, "read_into", instead)


def after_piece(monkeypatch: pytest.MonkeyPatch, number: int, what: Callable[[], object]) -> None:
    """Run `what` once, when so many pieces of a package were sent: the head is the first."""
    sent: list[object] = []
    execute: Any = redis.client.Pipeline.execute

    def instead(self: redis.client.Pipeline, **options: object) -> object:
        is_piece = any(command[0] == "APPEND" for command, _ in self.command_stack)
        answer = execute(self, **options)
        if is_piece:
            sent.append(answer)
            if len(sent) == number:
                what()
        return answer

    monkeypatch.setattr(redis.client.Pipeline, "execute", instead)
