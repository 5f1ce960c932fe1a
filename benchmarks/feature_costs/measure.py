# SPDX-License-Identifier: Apache-2.0
"""What this machine can measure of the cost model of features: bandwidths, the real tower on the CPU, compression."""

import os
import socket
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from benchmarks.feature_costs import model
from benchmarks.results import Result
from benchmarks.servers import running_valkey
from benchmarks.timing import Action, medians

CHUNK = 4 * 1024**2


def measure(options: Namespace) -> Result:
    """Bandwidths, the tower and what its features are compressed to; then what the model of costs makes of them."""
    result = Result()
    measured = bandwidths(options.mebibytes * 1024**2, options.rounds)
    for name, rate in measured.items():
        result.add(name, "gb_s", {"here": rate})

    from benchmarks.feature_costs import tower  # torch, with its threads, after the bandwidths

    sizes = {"512": (512, 512), **model.INPUTS["pictures"]}
    here = tower.load(options.layers)
    for name in options.pictures:
        for what, number in tower.measure(here, sizes[name]).items():
            result.add(f"tower, {name}", what, {"here": number})
    made = tower.features(here, *sizes[options.pictures[0]])
    for codec, numbers in tower.compression(made, options.rounds).items():
        for what, number in numbers.items():
            result.add(codec, what, {"here": number})
    add_model(result, measured)
    return result


def add_model(result: Result, measured: dict[str, float]) -> None:
    """Derived, not measured: seconds of the tower, and to load what it makes, of each model and picture on each GPU."""
    for package in model.packages():
        for gpu in model.INPUTS["gpus"]:
            case = f"{package.model}, {package.picture}, {gpu}"
            result.add(case, "time_s", model.seconds(package, gpu, measured))


def bandwidths(num_bytes: int, rounds: int) -> dict[str, float]:
    """GB/s by name; medians of some rounds."""
    with (
        running_valkey() as server,
        tempfile.TemporaryDirectory(dir=Path.home()) as folder,  # /tmp may be RAM
    ):
        kept = {**memory(num_bytes, rounds), **disk(Path(folder), num_bytes, rounds)}
        return {**kept, **valkey(server, num_bytes, rounds)}


def gb_s(num_bytes: int, action: Action, rounds: int, before: Action = lambda: None) -> float:
    """Bytes by the median seconds of an action; `before` is done ahead of each round and not timed."""

    def prepare() -> Action:
        before()
        return action

    return num_bytes / medians({"": prepare}, rounds, warm_up=1)[""] / 1e9


def memory(num_bytes: int, rounds: int) -> dict[str, float]:
    """Copies within RAM, and BLAKE3 on one thread and on two."""
    source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    target = np.empty_like(source)
    return {
        "memcpy": gb_s(num_bytes, lambda: np.copyto(target, source), rounds),
        "blake3": gb_s(num_bytes, lambda: blake3(source.data).digest(), rounds),
        "blake3_2_threads": gb_s(num_bytes, lambda: blake3(source.data, max_threads=2).digest(), rounds),
    }


def disk(folder: Path, num_bytes: int, rounds: int) -> dict[str, float]:
    """Reads of one file into memory that is there: from the page cache, and after the kernel was told to forget it."""
    path = folder / "package"
    path.write_bytes(os.urandom(num_bytes))
    target = memoryview(bytearray(num_bytes))
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())

        def forget() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def read() -> None:
            at = 0
            while at < num_bytes:
                at += os.preadv(file.fileno(), [target[at:]], at)

        return {"read_warm": gb_s(num_bytes, read, rounds), "read_cold": gb_s(num_bytes, read, rounds, before=forget)}


def valkey(server: Any, num_bytes: int, rounds: int) -> dict[str, float]:
    """Reads over loopback by one connection, in chunks, from the socket straight into memory that is there.

    `valkey_client` is the same through redis-py, which copies several times.
    """
    names = [f"chunk-{number}" for number in range(num_bytes // CHUNK)]
    for name in names:
        server.client.set(name, os.urandom(CHUNK))
    target = memoryview(bytearray(CHUNK))

    def through_client() -> None:
        for name in names:
            target[:] = server.client.get(name)

    with socket.create_connection(("127.0.0.1", server.port)) as connection:

        def read() -> None:
            for name in names:
                connection.sendall(f"GET {name}\r\n".encode())
                receive(connection, memoryview(bytearray(len(f"${CHUNK}\r\n"))))
                receive(connection, target)
                receive(connection, memoryview(bytearray(2)))

        direct = gb_s(CHUNK * len(names), read, rounds)
    return {"valkey": direct, "valkey_client": gb_s(CHUNK * len(names), through_client, rounds)}


def receive(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`."""
    at = 0
    while at < len(target):
        at += connection.recv_into(target[at:])
