# SPDX-License-Identifier: Apache-2.0
"""The memory that an engine shares with its workers: what one process writes others see, and nobody can resize it."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from vllm_mmcache.base.errors import ArenaUnusable
from vllm_mmcache.components.features.arena import BOARD, HEAD_BYTES, MAGIC, Arena

SIZE = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(SIZE, num_ranks=4)
    yield made
    made.close()


def path_of(address: str) -> str:
    return address.partition("#")[0]


def test_memory_is_committed_when_it_is_written() -> None:
    arena = Arena.create(64 << 30, num_ranks=1)
    fd = int(path_of(arena.address).rpartition("/")[2])
    before = os.fstat(fd).st_blocks * 512
    assert before < 1 << 20
    arena.buffer(32 << 30, SIZE)[:] = bytes(SIZE)
    assert SIZE <= os.fstat(fd).st_blocks * 512 - before <= 8 * SIZE  # huge pages round up
    arena.close()


def test_closing_leaves_buffers_that_are_in_use() -> None:
    arena = Arena.create(SIZE, num_ranks=1)
    used = arena.buffer(0, 4)
    used[:] = b"used"
    address = arena.address
    arena.close()
    arena.close()
    assert bytes(used) == b"used"
    with pytest.raises(ValueError, match="not in a data area of 0 bytes"):
        arena.buffer(0, 1)
    with pytest.raises(ArenaUnusable):
        Arena.open(address)


def test_sizes() -> None:
    arena = Arena.create(mmap.PAGESIZE + 1, num_ranks=100)
    assert arena.num_bytes == 2 * mmap.PAGESIZE
    assert (arena.board.shape, arena.board.dtype) == ((100,), BOARD)
    assert BOARD.itemsize % 8 == HEAD_BYTES % 8 == 0  # numbers are aligned
    arena.board.view(np.uint8)[:] = 255
    assert not any(arena.buffer(0, arena.num_bytes))  # the board ends before the data
    opened = Arena.open(arena.address)
    assert (opened.num_bytes, len(opened.board)) == (arena.num_bytes, 100)
    for offset, num_bytes in ((-1, 1), (0, -1), (arena.num_bytes, 1), (0, arena.num_bytes + 1), (1 << 70, 1)):
        with pytest.raises(ValueError, match="not in a data area"):
            arena.buffer(offset, num_bytes)
    for one in (arena, opened):
        one.close()
    for num_bytes, num_ranks in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="an arena of"):
            Arena.create(num_bytes, num_ranks)


def forged(size: int, seals: int, head: bytes) -> int:
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, head, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_what_is_not_the_engines_is_refused(arena: Arena, tmp_path: Path) -> None:
    """As in another container, whose process of the same number has something of its own there."""
    path, _, token = arena.address.partition("#")
    head = os.pread(int(path.rpartition("/")[2]), HEAD_BYTES, 0)
    size = os.stat(path).st_size
    other = Arena.create(SIZE, num_ranks=4)
    plain, pipe = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT), os.pipe()
    os.pwrite(plain, head.ljust(size, b"\0"), 0)
    refused = {
        forged(size, 0, head): "not sealed",
        forged(size, SEALS & ~fcntl.F_SEAL_SHRINK, head): "not sealed",
        plain: "not sealed",
        pipe[0]: "not sealed",
        forged(size, SEALS, head.replace(MAGIC, b"vllm-mmcache arena 9".ljust(len(MAGIC), b"\0"))): "another version",
        forged(size, SEALS, b""): "another version",
        forged(8, SEALS, head[:8]): "another version",
        forged(size + 4096, SEALS, head): "does not fit 4 ranks",
        forged(size - 4096, SEALS, head): "does not fit 4 ranks",
    }
    for fd, why in {**refused, int(path_of(other.address).rpartition("/")[2]): "another engine"}.items():
        with pytest.raises(ArenaUnusable, match=why):
            Arena.open(f"/proc/{os.getpid()}/fd/{fd}#{token}")
    # What these have in common is not why: the same, whole and sealed, is opened.
    right = forged(size, SEALS, head)
    Arena.open(f"/proc/{os.getpid()}/fd/{right}#{token}").close()
    other.close()
    for fd in (*refused, pipe[1], right):
        os.close(fd)


@pytest.mark.parametrize("address", ["", "/dev/shm/x", "/proc/1/fd/../environ#" + 32 * "0", "/proc/1/fd/1", "\ud800"])
def test_no_address(address: str) -> None:
    with pytest.raises(ArenaUnusable, match="no address of an engine's shared memory"):
        Arena.open(address)


def test_a_refusal_leaves_nothing_open(arena: Arena) -> None:
    before = num_open(arena)
    opened = Arena.open(arena.address)
    assert num_open(arena) > before > 0  # the control
    opened.close()
    for _ in range(10):
        with pytest.raises(ArenaUnusable):
            Arena.open(arena.address[:-32] + 32 * "0")
        Arena.open(arena.address).close()
    assert num_open(arena) == before


def num_open(arena: Arena) -> int:
    """How often this process has the arena's memory open; other tests' threads open and close files of their own."""
    number, wanted = 0, os.stat(path_of(arena.address))
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            number += os.path.samestat(os.stat(f"/proc/self/fd/{name}"), wanted)
    return number
