# SPDX-License-Identifier: Apache-2.0
"""Stores on disk under several processes: killed while they write, at work at once, forked, and on two mounts."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.packages import held_bytes
from tests.support.refusals import SPOIL, in_namespace
from tests.support.writer_process import NUM_ENTRIES, SIZE_BYTES, content_of, name_of, open_backend, read
from vllm_mmcache.storage import files, sqlite
from vllm_mmcache.storage.backend import Backend

pytestmark = pytest.mark.process

PAGES_BYTES = 8 * 4096
"""What one write may need beyond its entry."""


@pytest.fixture(params=["files", "sqlite"])
def which(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend, and everybody waits for others for as long as a busy machine takes."""
    for module, name in ((files, "LOCK_S"), (sqlite, "READ_WAIT_S"), (sqlite, "WRITE_WAIT_S")):
        monkeypatch.setattr(module, name, 60.0)
    return str(request.param)


def start(which: str, place: Path, budget_bytes: int, seed: int, *rounds: str) -> "subprocess.Popen[str]":
    arguments = [which, str(place), str(budget_bytes), str(seed), *rounds]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.writer_process", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def assert_whole(which: str, backend: Backend) -> None:
    for info in list(backend.scan()):
        assert read(backend, info.name) in (None, content_of(which, info.name))
    assert backend.verify() is None


def unfinished(place: Path) -> bool:
    """Whether a killed writer has left a part: a file that is being written, or a journal that is not emptied."""
    left = [*place.glob("*/incoming"), *place.glob("*/*-journal")]
    return any(path.stat().st_size for path in left)


def test_killed_at_any_moment(which: str, tmp_path: Path) -> None:
    """Whatever it was at, the next one finds whole entries alone, and goes on."""
    size_bytes = SIZE_BYTES[which]
    budget_bytes = 10 * size_bytes
    num_unfinished = round_ = 0
    while round_ < 30 or num_unfinished <= 3:  # else nothing was killed where it matters
        assert round_ < 500, f"{num_unfinished} of {round_} writers were killed while they wrote"
        process = start(which, tmp_path, budget_bytes, round_)
        time.sleep(0.0013 * (round_ % 50))
        assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
        num_unfinished += unfinished(tmp_path)
        assert_whole(which, open_backend(which, tmp_path, budget_bytes))
        assert held_bytes(tmp_path) <= budget_bytes + 2 * size_bytes + PAGES_BYTES
        round_ += 1
    backend = open_backend(which, tmp_path, budget_bytes)
    content = content_of(which, name_of(99))
    usage = backend.put(name_of(99), [content], len(content))
    assert not unfinished(tmp_path)
    assert read(backend, name_of(99)) == content
    assert usage.held_bytes == backend.sizes()[1] <= budget_bytes + PAGES_BYTES
    backend.close()
    if which == "files":
        assert usage.held_bytes == held_bytes(tmp_path)


def test_processes_keep_one_budget(which: str, tmp_path: Path) -> None:
    size_bytes = SIZE_BYTES[which]
    budget_bytes = 10 * size_bytes
    processes = [start(which, tmp_path, budget_bytes, seed, "100") for seed in range(3)]
    backend = open_backend(which, tmp_path, budget_bytes)
    peak_bytes, found, runs = 0, 0, True
    while runs:  # and once more when they have ended
        runs = any(process.poll() is None for process in processes)
        peak_bytes = max(peak_bytes, held_bytes(tmp_path) if which == "files" else backend.sizes()[1])
        for number in range(0, NUM_ENTRIES, 5):
            seen = read(backend, name_of(number))
            assert seen in (None, content_of(which, name_of(number)))
            found += seen is not None
    assert [process.communicate()[1] for process in processes] == [""] * 3
    assert [process.returncode for process in processes] == [0] * 3
    assert 0.6 * budget_bytes < peak_bytes <= budget_bytes + size_bytes + PAGES_BYTES
    assert found
    assert_whole(which, backend)


TWO_MOUNTS = """
import sys
from tests.support.writer_process import be_patient, content_of, name_of, open_backend, parts_of, read
be_patient()
which, place, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
backend = open_backend(which, place, 1 << 30)
for number in range(first, first + 30):
    content = content_of(which, name_of(number))
    backend.put(name_of(number), parts_of(content), len(content))
    for other in (number, (number + 100) % 200):
        seen = read(backend, name_of(other))
        assert seen == content_of(which, name_of(other)) or (seen is None and other != number)
"""


def test_two_machines_with_one_directory(which: str, tmp_path: Path) -> None:
    """Each has it mounted somewhere else, and writes to it while the other does."""
    store = tmp_path / "exported"
    store.mkdir(mode=0o700)
    machines = []
    for first in (0, 100):
        mount = tmp_path / f"machine {first}" / "store"
        mount.mkdir(parents=True)
        command = [sys.executable, "-c", TWO_MOUNTS, which, str(mount), str(first)]
        machines.append(in_namespace(f"mount --bind '{store}' '{mount}'", command))
    for machine in machines:
        _, said = machine.communicate(timeout=120)
        assert (machine.returncode, said) == (0, "")
    backend = open_backend(which, store, 1 << 30)
    assert {info.name for info in backend.scan()} == {name_of(first + n) for first in (0, 100) for n in range(30)}
    assert_whole(which, backend)
    if which == "files":
        assert int((store / "things" / "lock").read_text()) == held_bytes(store) == 60 * SIZE_BYTES[which]


FORK = """
import os, sys
from tests.support.writer_process import be_patient, content_of, name_of, open_backend, parts_of, read
be_patient()
which, place = sys.argv[1:]
backend = open_backend(which, place, 1 << 30)

def put(number):
    content = content_of(which, name_of(number))
    backend.put(name_of(number), parts_of(content), len(content))

def has(number):
    return read(backend, name_of(number)) == content_of(which, name_of(number))

put(0)
assert has(0)
child = os.fork()
mine = 100 if child else 200
for number in range(mine, mine + 20):
    put(number)
    assert has(number) and has(0)
if not child:
    os._exit(0)  # nothing is closed, flushed or ended of what the parent has
assert os.waitpid(child, 0)[1] == 0
assert all(has(number) for number in (*range(100, 120), *range(200, 220)))
put(1)
assert backend.verify() is None and backend.sizes()[0] == 42
backend.close()
"""


def test_a_forked_child_goes_on(which: str, tmp_path: Path) -> None:
    """With what its parent has opened, beside it."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, which, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert_whole(which, open_backend(which, tmp_path, 1 << 30))


SPOILED = """
import sys
from tests.support.storage_contract import CONTENTS
from tests.support.writer_process import open_backend
from vllm_mmcache.storage.tier import Tier

contents = CONTENTS["small things"]
tier = Tier(contents.kind, open_backend(*sys.argv[1:3], 1 << 20), rest_s=(0.0, 0.0))
for line in sys.stdin:  # one for each time that its files were spoiled
    for number in range(20):
        contents.put(tier, number)
        assert contents.find(tier, number) in (None, contents.content(number))
        assert contents.find(tier, 0) in (None, contents.content(0))
    contents.put(tier, 0)
    print(contents.find(tier, 0) is not None, flush=True)
"""


@pytest.mark.parametrize("how", SPOIL)
def test_no_spoiled_file_ends_a_process(which: str, how: str, tmp_path: Path) -> None:
    """Whatever happens to any file of the store while it is in use: entries are missed, and kept again later."""
    process = subprocess.Popen(
        [sys.executable, "-c", SPOILED, which, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    spoiled = set()
    for number in range(16):
        process.stdin.write("go\n")
        process.stdin.flush()
        if number % 2:  # while it is reading and writing, else between
            time.sleep(0.002)
        else:
            assert process.stdout.readline() == "True\n", process.communicate()[1]
        for path in files_of(tmp_path):
            with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                SPOIL[how](path)
                spoiled.add(path.suffix.partition("-")[0])
        if number % 2:
            assert process.stdout.readline(), process.communicate()[1]
        for path in files_of(tmp_path, lambda path: path.is_dir() and bool(path.suffix)):
            path.rmdir()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert spoiled & {".sqlite", ".thing"}


def files_of(place: Path, chosen: Callable[[Path], bool] = Path.is_file) -> list[Path]:
    """But the lock, which a writer holds and others must not lose."""
    return [path for path in sorted(place.rglob("*")) if chosen(path) and path.name != "lock"]
