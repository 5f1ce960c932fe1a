# SPDX-License-Identifier: Apache-2.0
"""What loading an image's features costs beside making them: a model of bandwidths and operations.

A load is a chain of stages, one after the other, which is the worst case: pieces that are read while others are copied
are faster. The tower's time is its matrix products, counted, by what a GPU does of them in a second. What this machine
can measure of it is the bandwidth of BLAKE3, of the page cache and of a Valkey.
"""

import contextlib
import json
import os
import socket
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from benchmarks.results import Action, Result, medians
from benchmarks.servers import running_valkey

INPUTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
BYTES_PER_VALUE = 2  # bfloat16
CHUNK = 4 * 1024**2


def measure(options: Namespace) -> Result:
    """Bandwidths in GB/s, then what the model makes of them."""
    result, num_bytes = Result(), options.mebibytes * 1024**2
    content, room = os.urandom(num_bytes), memoryview(bytearray(num_bytes))
    reply = memoryview(bytearray(len(f"${CHUNK}\r\n") + CHUNK + 2))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_valkey())
        file = stack.enter_context(tempfile.TemporaryFile(dir=Path.home(), buffering=0))  # /tmp may be RAM
        file.write(content)
        chunks = range(0, num_bytes, CHUNK)
        server.client.mset({start: content[start : start + CHUNK] for start in chunks})
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))

        def read_valkey() -> None:  # from the socket straight into memory that is there
            for start in chunks:
                connection.sendall(f"GET {start}\r\n".encode())
                fill(connection.recv_into, reply)

        def read_warm() -> Action:
            file.seek(0)
            return lambda: fill(file.readinto, room)

        work = {
            "blake3": lambda: lambda: blake3(content).digest(),
            "read_warm": read_warm,
            "valkey": lambda: read_valkey,
        }
        found = {name: num_bytes / time_s / 1e9 for name, time_s in medians(work, options.rounds, warm_up=1).items()}
    for name, rate in found.items():
        result.add(name, "gb_s", {"here": rate})
    add_model(result, found)
    return result


def fill(read_into: Callable[[memoryview], int], target: memoryview) -> None:
    while target:
        target = target[read_into(target) :]


def add_model(result: Result, measured: Mapping[str, float]) -> None:
    """Derived, not measured: seconds of the tower, and to load what it makes, of each model and picture on each GPU."""
    for package in packages():
        for gpu in INPUTS["gpus"]:
            result.add(f"{package.model}, {package.picture}, {gpu}", "time_s", seconds(package, gpu, measured))


class Package(NamedTuple):
    """One image's features of a model. `flops` are floating point operations of the tower."""

    model: str
    picture: str
    num_tokens: int
    num_bytes: int
    flops: float


def packages() -> Iterator[Package]:
    """All models at all pictures, or token budgets."""
    for name, model in INPUTS["models"].items():
        tower = INPUTS["towers"][model["tower"]]
        side = tower["patch"] * tower["merge"]
        shown = {f"{tokens:,} tokens": tokens for tokens in model.get("soft_tokens", ())} or {
            picture: round(width / side) * round(height / side)
            for picture, (width, height) in INPUTS["pictures"].items()
        }
        for picture, tokens in shown.items():
            num_bytes = tokens * model["width"] * BYTES_PER_VALUE
            yield Package(name, picture, tokens, num_bytes, tower_flops(tower, tokens, model["out"]))


def tower_flops(tower: Mapping[str, Any], num_tokens: int, out: int) -> float:
    """Matrix products of a vision tower for one image, two operations a multiplication.

    Each patch looks at all others. A merger makes a token of merge x merge patches, through one layer of their width.
    A patch is so many frames deep, an image repeated for it.
    """
    hidden, patches = tower["hidden"], num_tokens * tower["merge"] ** 2
    weights = 4 * hidden**2 + tower["matrices"] * hidden * tower["inner"]
    blocks = tower["layers"] * patches * (2 * weights + 4 * patches * hidden)
    embedding = 2 * patches * hidden * 3 * tower["patch"] ** 2 * tower["frames"]
    merged = hidden * tower["merge"] ** 2
    mergers = tower["mergers"] * num_tokens * 2 * merged * (merged + out)
    projection = 0 if tower["mergers"] else num_tokens * 2 * hidden * out
    return float(blocks + embedding + mergers + projection)


def seconds(package: Package, gpu: str, measured: Mapping[str, float]) -> dict[str, float]:
    """Of the tower, by the GPU's data sheet, and of a load by tier. `measured` are GB/s of this machine by name."""
    said = INPUTS["gpus"][gpu]
    times = {"tower": package.flops / (said["tflops"] * 1e12 * INPUTS["efficiency"]["value"])}
    for tier, stages in INPUTS["tiers"].items():  # a stage takes as long as the slowest of its media
        times[tier] = sum(package.num_bytes / min(rate(name, gpu, measured) for name in stage) for stage in stages)
    return times


def rate(name: str, gpu: str, measured: Mapping[str, float]) -> float:
    """Bytes a second of one medium; `h2d` is that of the GPU."""
    said = INPUTS["rates"][INPUTS["gpus"][gpu]["h2d"] if name == "h2d" else name]
    return 1e9 * float(said["gb_s"] if "gb_s" in said else measured[said["measured"]] * said.get("times", 1))
