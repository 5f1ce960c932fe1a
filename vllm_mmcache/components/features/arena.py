# SPDX-License-Identifier: Apache-2.0
"""Memory that an engine shares with its workers: a board with one row per rank, then room for features.

A sealed memfd. It has no name in any file system, so nothing is left behind, whatever kills its processes, and no size
of /dev/shm bounds it. The seals forbid to resize it, so no access can end in SIGBUS because someone truncated it. The
engine creates it; workers open it through /proc, at once or hours later. Who may do that is who may look into the
engine's process: the same user, on the same host, in the same PID namespace. Linux only.

    head    MAGIC, token of this arena, number of ranks, bytes of data    (HEAD_BYTES)
    board   BOARD, one row per rank
    data    from the next whole page on
"""

import fcntl
import mmap
import os
import re
import secrets
import weakref
from struct import Struct
from typing import Any

import numpy as np

from vllm_mmcache.base.errors import ArenaUnusable

MAGIC = b"vllm-mmcache arena 1\0\0\0\0"
TOKEN_BYTES = 16

BOARD = np.dtype(
    [
        ("loads_done", "<u8"),
        ("saves_done", "<u8"),
        ("generation", "<u8"),
        ("fingerprint", "S64"),
        ("tower_s", "<f8", (32,)),
    ]
)
"""What one rank tells the engine; it alone writes its row. A number is read whole, several fields are not.

tower_s: seconds of the tower per token, by the logarithm of the tokens to base 2; 0 is unknown.
"""

_HEAD = Struct(f"<{len(MAGIC)}s{TOKEN_BYTES}sQQ")  # magic, token, number of ranks, bytes of data
HEAD_BYTES = 64
_ADDRESS = re.compile(rf"(/proc/[0-9]+/fd/[0-9]+)#([0-9a-f]{{{2 * TOKEN_BYTES}}})")


class Arena:
    """Shared memory of one engine. Use `create` in the engine, `open` in its workers; any thread."""

    def __init__(self, fd: int, address: str, num_ranks: int, num_bytes: int) -> None:
        start = _data_start(num_ranks)
        shared = mmap.mmap(fd, start + num_bytes)
        self.address = address
        """Plain text that leads a worker here, /proc/123/fd/7#TOKEN; for as long as the creator has it open."""
        self.num_bytes = num_bytes
        """Size of the data area, in whole pages."""
        self.board: np.ndarray[Any, Any] = np.frombuffer(shared, BOARD, num_ranks, HEAD_BYTES)
        """Shape (num_ranks,), dtype BOARD, writable, shared; all zero at first."""
        self._data = memoryview(shared)[start:]
        self._let_go = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, num_bytes: int, num_ranks: int) -> "Arena":
        """Memory for `num_bytes` of data, rounded up to whole pages, all zero; a page is committed when it is written.

        Raises: ArenaUnusable where this system does not give such memory; ValueError for less than one byte or rank.
        """
        if num_bytes < 1 or num_ranks < 1:
            raise ValueError(f"an arena of {num_bytes} bytes for {num_ranks} ranks")
        if not hasattr(os, "memfd_create"):
            raise ArenaUnusable("there is no memory to share with the workers: this platform has no memfd (Linux has)")
        num_bytes, token = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, secrets.token_bytes(TOKEN_BYTES)
        fd = -1
        try:
            fd = os.memfd_create("vllm-mmcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, _data_start(num_ranks) + num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
            os.pwrite(fd, _HEAD.pack(MAGIC, token, num_ranks, num_bytes), 0)
            return cls(fd, f"/proc/{os.getpid()}/fd/{fd}#{token.hex()}", num_ranks, num_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaUnusable(
                f"there is no memory to share with the workers: {num_bytes} bytes of memfd failed: {error}. "
                "Lower feature_ram_bytes, or see what the system's limits allow"
            ) from error

    @classmethod
    def open(cls, address: str) -> "Arena":
        """The arena that another process made, by its `address`; also long after.

        Raises: ArenaUnusable where its creator is not there, or something else is at the address.
        """
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise ArenaUnusable(f"no address of an engine's shared memory: {address!r:.200}")
        path, token = match[1], bytes.fromhex(match[2])
        fd = -1
        try:
            # Whatever else could be at the address: a pipe does not block, and a terminal does not become ours.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            return cls(fd, address, *_sizes(fd, token))
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaUnusable(
                f"the engine's shared memory is not at {path}: {error}. Its workers must be of the same user, "
                "on the same host, and in the same PID namespace"
            ) from error

    def buffer(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes [offset, offset + num_bytes) of the data area, writable. Raises: ValueError outside of it."""
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise ValueError(f"[{offset}, {offset} + {num_bytes}) is not in a data area of {self.num_bytes} bytes")
        return self._data[offset : offset + num_bytes]

    def empty(self) -> None:
        """Give the pages of the data area back to the system, for all that have it open; they read as zeros then."""
        shared, size = self._data.obj, len(self._data)
        if size and isinstance(shared, mmap.mmap):
            shared.madvise(mmap.MADV_REMOVE, len(shared) - size, size)

    def close(self) -> None:
        """Let go of the memory; where buffers of it are still in use, it goes with the last of them.

        The same happens to an arena that nobody has any more.
        """
        self._let_go()
        self.num_bytes = 0
        self.board, self._data = np.zeros(0, BOARD), memoryview(b"")


def _sizes(fd: int, token: bytes) -> tuple[int, int]:
    """Number of ranks and bytes of data of the arena behind `fd`. Raises: OSError, saying what it is instead."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _seals() != _seals():
        raise OSError("what is there is not sealed, so it is not ours")
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size or not head.startswith(MAGIC + token):
        raise OSError("what is there belongs to another engine, or to another version of mmcache")
    _, _, num_ranks, num_bytes = _HEAD.unpack(head)
    if (size := os.fstat(fd).st_size) != _data_start(num_ranks) + num_bytes:
        raise OSError(f"it has {size} bytes, which does not fit {num_ranks} ranks and {num_bytes} bytes of data")
    return num_ranks, num_bytes


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _data_start(num_ranks: int) -> int:
    return -(-(HEAD_BYTES + num_ranks * BOARD.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
