# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy in a process of its own: so many bytes a second come through from the server, over all connections."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def slow(port: int, bytes_per_s: float) -> Iterator[int]:
    """The port of a proxy in front of `port` of this machine, until the block ends; it yields to all, as a network."""
    command = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.slow", str(port), str(bytes_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def serve(server_port: int, bytes_per_s: float) -> None:
    free_at = time.monotonic()  # when the line has carried all that it was given

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_slow: bool) -> None:
        nonlocal free_at
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(64 * 1024):
                if is_slow:
                    free_at = max(free_at, time.monotonic()) + len(piece) / bytes_per_s
                    await asyncio.sleep(free_at - time.monotonic())
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server_port)
        await asyncio.gather(carry(reader, to_server, False), carry(from_server, writer, True))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
