# SPDX-License-Identifier: Apache-2.0
"""A process that puts entries into a store for as long as it lives: BACKEND PLACE BUDGET_BYTES SEED [ROUNDS].

An entry is what its name and the backend say, so that whoever finds one knows what it must be. Imports little, so that
fifty of these start in seconds.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_mmcache.storage import files, sqlite
from vllm_mmcache.storage.backend import Backend
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.sqlite import SqliteBackend

KIND = Kind(name="things", format=1, said="things in {}", counters={}, rejected="", disk_budget="", suffix=".thing")
NUM_ENTRIES = 40
SIZE_BYTES = {"files": 256 * 1024, "sqlite": 32 * 1024}


def open_backend(backend: str, place: str | Path, budget_bytes: int) -> Backend:
    """The backend of that name."""
    kind = FileBackend if backend == "files" else SqliteBackend
    return kind(place, KIND, budget_bytes)


def name_of(number: int) -> bytes:
    """The name of the entry of that number."""
    return b"%032d" % number


def content_of(backend: str, name: bytes) -> bytes:
    """What the entry must be."""
    return random.Random(name).randbytes(SIZE_BYTES[backend])


def read(backend: Backend, name: bytes) -> bytes | None:
    """What is there, as a whole."""
    with backend.open(name) as entry:
        if entry is None:
            return None
        content = bytearray(entry.num_bytes)
        entry.read_into(0, memoryview(content), 0.0)
        return bytes(content)


def parts_of(content: bytes) -> Iterator[memoryview]:
    """The content in four parts."""
    size = len(content) // 4
    return (memoryview(content)[start : start + size] for start in range(0, len(content), size))


def be_patient() -> None:
    """Wait for others for as long as a busy machine takes; before a backend is opened."""
    files.LOCK_S = sqlite.READ_WAIT_S = sqlite.WRITE_WAIT_S = 60.0


def main(which: str, place: str, budget_bytes: str, seed: str, rounds: str = "1000000") -> None:
    be_patient()
    backend = open_backend(which, place, int(budget_bytes))
    contents = {name_of(number): content_of(which, name_of(number)) for number in range(NUM_ENTRIES)}
    drawn = random.Random(seed)
    print("ready", flush=True)
    for _ in range(int(rounds)):
        name = drawn.choice(sorted(contents))
        if read(backend, name) not in (None, contents[name]):
            sys.exit("a wrong read")
        backend.put(name, parts_of(contents[name]), len(contents[name]))


if __name__ == "__main__":
    main(*sys.argv[1:])
