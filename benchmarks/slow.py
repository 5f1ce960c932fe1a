# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy in a process of its own: so many bytes a second come through from the server, over all connections."""

import asyncio
import multiprocessing
import os
import socket
import time
from contextlib import suppress
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Self

PIECE_BYTES = 64 * 1024


class SlowProxy:
    """In front of `port` of this machine, within the block; `port` is its own."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        context = multiprocessing.get_context("spawn")
        self._ready = context.Event()
        self._process = context.Process(target=_serve, args=(self.port, port, bytes_per_s, self._ready), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        assert self._ready.wait(30), "the proxy did not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()


def _serve(port: int, server_port: int, bytes_per_s: float, ready: Event) -> None:
    os.nice(19)  # it stands for a network
    asyncio.run(_run(port, server_port, bytes_per_s, ready))


async def _run(port: int, server_port: int, bytes_per_s: float, ready: Event) -> None:
    free_at = time.monotonic()  # when the line has carried all that it was given

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_slow: bool) -> None:
        nonlocal free_at
        with suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                if is_slow:
                    free_at = max(free_at, time.monotonic()) + len(piece) / bytes_per_s
                    await asyncio.sleep(free_at - time.monotonic())
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server_port)
        await asyncio.gather(carry(reader, to_server, False), carry(from_server, writer, True))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    ready.set()
    async with server:
        await server.serve_forever()
