# SPDX-License-Identifier: Apache-2.0
"""The memory that an engine shares with its workers, between real processes: forked, killed, and resized."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.unit.components.features.test_arena import SIZE, arena, path_of
from vllm_mmcache.base.errors import ArenaUnusable
from vllm_mmcache.components.features.arena import Arena

__all__ = ["arena"]

Process = subprocess.Popen[str]


def start(code: str, *arguments: object) -> Process:
    """A process of its own that runs `code`, with `arguments` in sys.argv, and talks line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, sys\nfrom vllm_mmcache.components.features.arena import Arena\n{code}"]
        + [str(argument) for argument in arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: Process) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.communicate()[1]
    return line


def run(code: str, *arguments: object) -> str:
    out, error = start(code, *arguments).communicate(timeout=60)
    assert not error, error
    return out.strip()


WRITE = """
arena = Arena.open(sys.argv[1])
print(bytes(arena.buffer(4096, 5)).decode())
arena.buffer(8192, 5)[:] = b"child"
arena.board[2]["fingerprint"] = b"ab" * 32
arena.board[2]["tower_s"][31] = 0.5
"""


@pytest.mark.process
def test_what_a_child_writes_is_seen(arena: Arena) -> None:
    """And the other way round, also when the child comes long after."""
    arena.buffer(4096, 5)[:] = b"owner"
    assert run(WRITE, arena.address) == "owner"
    assert bytes(arena.buffer(8192, 5)) == b"child"
    assert arena.board["fingerprint"].tolist() == [b"", b"", b"ab" * 32, b""]
    assert arena.board["tower_s"].sum() == arena.board[2]["tower_s"][31] == 0.5
    assert not any(arena.buffer(0, 4096))


COUNT = """
arena, rank, number = Arena.open(sys.argv[1]), int(sys.argv[2]), 0
while not arena.board[3]["generation"]:
    number += 1
    arena.board[rank]["saves_done"] = number
    arena.board[rank]["generation"] = number << 32 | number
print(number)
"""


@pytest.mark.process
def test_rows_of_the_board_are_independent(arena: Arena) -> None:
    ranks = [start(COUNT, arena.address, rank) for rank in range(3)]
    seen = [arena.board["generation"].copy()]
    while (seen[-1][:3] < 1000).any() or len(seen) < 100:  # until all have been seen at work
        assert all(rank.poll() is None for rank in ranks), [rank.communicate() for rank in ranks]
        now = arena.board["generation"].copy()
        if (now != seen[-1]).any():
            seen.append(now)
    arena.board[3]["generation"] = 1
    outcomes = [rank.communicate(timeout=60) for rank in ranks]
    assert [error for _, error in outcomes] == [""] * 3
    assert arena.board["saves_done"].tolist() == [*(int(said) for said, _ in outcomes), 0]
    numbers = np.array(seen)[:, :3]
    assert (numbers >> 32 == numbers & 0xFFFFFFFF).all()  # a number is never half old
    assert (np.diff(numbers.astype(np.int64), axis=0) >= 0).all()


RESIZE = """
fd = os.open(sys.argv[1], os.O_RDWR)
for attempt in (lambda: os.ftruncate(fd, 0), lambda: os.truncate(sys.argv[1], 1 << 30),
                lambda: os.open(sys.argv[1], os.O_RDWR | os.O_TRUNC)):
    try:
        attempt()
        print("done")
    except PermissionError as error:
        print(error.strerror)
"""


@pytest.mark.process
def test_no_process_can_resize_it(arena: Arena) -> None:
    arena.buffer(0, 3)[:] = b"all"
    assert run(RESIZE, path_of(arena.address)).splitlines() == ["Operation not permitted"] * 3
    assert bytes(arena.buffer(0, 3)) == b"all"
    assert bytes(arena.buffer(SIZE - 1, 1)) == b"\0"  # the last page is there


@pytest.mark.process
def test_unsealed_memory_can_be_resized() -> None:
    """The control of the test above."""
    fd = os.memfd_create("plain", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    assert run(RESIZE, f"/proc/{os.getpid()}/fd/{fd}").splitlines() == ["done"] * 3
    assert os.fstat(fd).st_size == 0
    os.close(fd)


CREATE = f"""
arena = Arena.create({SIZE}, 2)
arena.buffer(0, 5)[:] = b"owner"
print(arena.address, flush=True)
input()
"""
GO_ON = """
arena = Arena.open(sys.argv[1])
print(os.stat(sys.argv[1].partition("#")[0]).st_nlink, flush=True)
input()
arena.buffer(8192, 5)[:] = b"still"
print(bytes(arena.buffer(0, 5)) + bytes(arena.buffer(8192, 5)), flush=True)
"""


@pytest.mark.process
def test_killing_the_creator_leaves_the_mapping_and_no_file() -> None:
    creator = start(CREATE)
    address = said(creator)
    worker = start(GO_ON, address)
    assert said(worker) == "0"  # no name in any directory, so there is nothing to leave behind
    creator.kill()
    creator.communicate()
    with pytest.raises(ArenaUnusable, match=r"not at /proc/\d+/fd/\d+: .*No such file"):
        Arena.open(address)
    assert worker.communicate("\n", timeout=60) == (f"{b'ownerstill'!r}\n", "")


@pytest.mark.process
def test_a_forked_child_shares_it() -> None:
    code = CREATE.replace("input()", "pid = os.fork()\nif not pid: arena.buffer(0, 5)[:] = b'child'; os._exit(0)")
    assert run(code + "os.waitpid(pid, 0)\nprint(bytes(arena.buffer(0, 5)))").endswith("b'child'")


LIMITED = """
import resource
from vllm_mmcache.base.errors import ArenaUnusable
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
Arena.create(1 << 19, 1).close()
before = len(os.listdir("/proc/self/fd"))
try:
    Arena.create(1 << 21, 1)
except ArenaUnusable as error:
    print(error, len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.process
def test_a_system_that_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    out = run(LIMITED)
    assert "2097152 bytes of memfd failed: [Errno 27] File too large" in out
    assert out.endswith(" 0")
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ArenaUnusable, match="this platform has no memfd"):
        Arena.create(SIZE, num_ranks=1)
