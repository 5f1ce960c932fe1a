# SPDX-License-Identifier: Apache-2.0
"""The faults, each under its name: how it begins, what is done again and again while it is in force, how it ends.

They strike the store's directory and a real Valkey. The directory is a file system of its own where this user may mount
one, so that it can be full and read-only; where they may not, the faults that need one are left out.

What a fault destroys stays destroyed when it ends; what it keeps from working works again. Each names the counters of
/metrics of which one has to grow while it is in force: otherwise it has not reached the server, and says nothing.
"""

import fcntl
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import redis

DISK_BYTES = 8 << 20  # of the file system
EVERY_S = 0.2
PACKAGES = "features/??/*.safetensors"
DATABASE = ("records/*.sqlite", "records/*.sqlite-journal")
KEYS = "mmcache:*"
LEAST_LOCKED_S = 8.0  # the server waits 5 s for a lock
MOST_ASLEEP_S = 2.0  # of Valkey, for which the server waits 0.5 s
FULL = "2mb"  # less than Valkey takes with nothing in it

NO_FILE = ("features_set_aside", "record_corrupt", "record_errors")
NO_DISK = ("features_errors{disk}", "record_errors{disk}", "record_dropped{disk}")
NO_VALKEY = ("features_errors{remote}", "record_errors{remote}")
NO_VALUE = ("features_set_aside{remote}", "record_corrupt{remote}")
LOST_FILE = ("features_set_aside{disk}",)


class Scene:
    """The store's directory, `place`, which exists within the block, and Valkey; `held` is what a fault holds open."""

    def __init__(self, folder: Path, valkey: Any) -> None:
        self.root, self.valkey = folder / "disk", valkey
        self.place, self.ballast = self.root / "store", self.root / "ballast"
        self.held, self.chance = ExitStack(), random.Random(0)

    def __enter__(self) -> Self:
        self.root.mkdir()
        self.is_mounted = mount("-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "mmcache-chaos", self.root)
        self.place.mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_mounted:
            unmount(self.root)

    def some_packages(self) -> list[Path]:
        """A quarter of them, one at least if there is one."""
        found = self.files(PACKAGES)
        return self.chance.sample(found, -(-len(found) // 4))

    def files(self, *patterns: str) -> list[Path]:
        """What of the store matches one of the patterns."""
        return [path for pattern in patterns for path in self.place.glob(pattern)]


def mount(*arguments: str | Path) -> bool:
    """Whether it was done."""
    with suppress(OSError):
        return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
    return False


def unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", path], check=True)


Act = Callable[[Scene], object]


@dataclass(frozen=True)
class Fault:
    """See above. `seen`: what names of counters begin with, `name{place}`, as in measure.py."""

    seen: tuple[str, ...]
    begin: Act = lambda scene: None
    again: Act = lambda scene: None
    end: Act = lambda scene: None
    needs_mount: bool = False
    least_s: float = 0.0
    """Seconds before which it can't leave a trace."""


@contextmanager
def in_force(fault: Fault, scene: Scene, seed: int) -> Iterator[None]:
    """The fault, from the begin to the end of the block, in which another thread goes on with it."""
    scene.chance, ended = random.Random(seed), threading.Event()
    fault.begin(scene)

    def go_on() -> None:
        while not ended.wait(EVERY_S):
            with suppress(OSError, redis.RedisError, sqlite3.Error):  # the server changes the same things
                fault.again(scene)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        fault.end(scene)


def truncate(scene: Scene) -> None:
    """Cut packages, the database and its log, somewhere."""
    for path in (*scene.some_packages(), *scene.files(*DATABASE)):
        with suppress(OSError):
            os.truncate(path, scene.chance.randrange(path.stat().st_size + 1))


def flip(scene: Scene) -> None:
    """Change bytes in place: a few in a package, more in the database and its log."""
    for path in (*scene.some_packages(), *scene.files(*DATABASE)):
        number = 3 if path.suffix == ".safetensors" else 50
        with suppress(OSError, ValueError), path.open("r+b") as file:
            for _ in range(number):
                at = scene.chance.randrange(path.stat().st_size)  # ValueError: it is empty
                (old,) = os.pread(file.fileno(), 1, at) or b"\0"
                os.pwrite(file.fileno(), bytes([old ^ scene.chance.randrange(1, 256)]), at)


def exchange_files(scene: Scene) -> None:
    """Put packages of other pictures, each whole, under a package's name."""
    for path, other in zip(scene.some_packages(), scene.some_packages(), strict=False):
        with suppress(OSError):
            shutil.copyfile(other, path.with_suffix(".other"))
            path.with_suffix(".other").rename(path)


def remove(scene: Scene) -> None:
    for path in scene.files("features", "records"):
        shutil.rmtree(path, ignore_errors=True)


def folders_mode(mode: int) -> Act:
    def change(scene: Scene) -> None:
        for path in scene.files("features", "records"):
            path.chmod(mode)

    return change


def fill_disk(scene: Scene) -> None:
    """To the last byte, and again whenever the server has made room."""
    with scene.ballast.open("ab", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def make_read_only(scene: Scene) -> None:
    """For whoever opens a file from now on, root too."""
    if not (mount("--bind", scene.place, scene.place) and mount("-o", "remount,bind,ro", scene.place)):
        raise OSError(f"{scene.place} can't be made read-only")


def replace_by_file(scene: Scene) -> None:
    """Root can't write to it, either."""
    scene.place.rename(scene.root / "away")
    scene.place.write_text("This was a directory.\n")


def put_back(scene: Scene) -> None:
    scene.place.unlink()
    (scene.root / "away").rename(scene.place)


def hold_locks(scene: Scene) -> None:
    """Those of the packages and of the database, as a process that hangs would."""
    with suppress(OSError):  # the server has it for a moment, or has none yet; the next round gets it
        lock = scene.held.enter_context((scene.place / "features" / "lock").open("r+b"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for path in sorted(scene.files(DATABASE[0]), key=os.path.getmtime)[-1:]:
        connection = sqlite3.connect(path, timeout=0.1, check_same_thread=False, isolation_level=None)
        scene.held.enter_context(closing(connection)).execute("BEGIN IMMEDIATE")


def slow_valkey(scene: Scene) -> None:
    """It sleeps most of the time, mostly longer than the server waits for it."""
    os.kill(scene.valkey.pid, signal.SIGSTOP)
    time.sleep(scene.chance.random() * MOST_ASLEEP_S)
    os.kill(scene.valkey.pid, signal.SIGCONT)


def restart_valkey(scene: Scene) -> None:
    scene.valkey.kill()
    time.sleep(EVERY_S)
    scene.valkey.start()


def plant_garbage(scene: Scene) -> None:
    """Noise, a piece of what was there, nothing at all, and other types, under our names; some stay as they are."""
    client = scene.valkey.client
    for name in client.scan_iter(KEYS, count=1000):
        match scene.chance.randrange(5):
            case 0:
                client.set(name, scene.chance.randbytes(scene.chance.randrange(1, 100_000)))
            case 1:
                client.setrange(name, scene.chance.randrange(1000), scene.chance.randbytes(16))
            case 2:
                client.set(name, client.getrange(name, 0, scene.chance.randrange(1000)))
            case 3:
                client.delete(name)
                client.rpush(name, "a", "b")


def exchange_values(scene: Scene) -> None:
    """Put what is whole under the name of another."""
    client = scene.valkey.client
    names = list(client.scan_iter(KEYS, count=1000))
    scene.chance.shuffle(names)
    for name, other in zip(names[::2], names[1::2], strict=False):
        client.copy(other, name, replace=True)


def damage_all(scene: Scene) -> None:
    scene.chance.choice((truncate, flip, exchange_files))(scene)
    scene.chance.choice((plant_garbage, exchange_values))(scene)


def signalled(number: int) -> Act:
    return lambda scene: os.kill(scene.valkey.pid, number)


def sent(*command: str | int) -> Act:
    """Valkey is sent a command."""
    return lambda scene: scene.valkey.client.execute_command(*command)


def empty_and_read_only(scene: Scene) -> None:
    """A server that has nothing, so that there is something to write, and takes no writes."""
    sent("FLUSHALL")(scene)
    sent("REPLICAOF", "127.0.0.1", "1")(scene)


# Those of the directory and those of Valkey in turn: what failed is left alone for a while, and would hide the next.
FAULTS: dict[str, Fault] = {
    "nothing": Fault(("features_hits{disk}", "features_hits{remote}")),
    "files truncated": Fault(LOST_FILE, again=truncate),
    "Valkey stopped": Fault(NO_VALKEY, signalled(signal.SIGSTOP), end=signalled(signal.SIGCONT)),
    "files corrupted": Fault(LOST_FILE, again=flip),
    "Valkey killed": Fault(NO_VALKEY, lambda scene: scene.valkey.kill(), end=lambda scene: scene.valkey.start()),
    "disk full": Fault(NO_DISK, again=fill_disk, end=lambda scene: scene.ballast.unlink(True), needs_mount=True),
    "Valkey slow": Fault(NO_VALKEY, again=slow_valkey),
    "files exchanged": Fault(LOST_FILE, again=exchange_files),
    "garbage in Valkey": Fault(NO_VALUE, again=plant_garbage),
    "directory read-only": Fault(NO_DISK, make_read_only, end=lambda scene: unmount(scene.place), needs_mount=True),
    "values exchanged": Fault(NO_VALUE, again=exchange_values),
    "files removed": Fault(("features_misses{disk}",), again=remove),
    "Valkey full": Fault(NO_VALKEY, sent("CONFIG SET", "maxmemory", FULL), end=sent("CONFIG SET", "maxmemory", 0)),
    "a file for the directory": Fault(NO_DISK, replace_by_file, end=put_back),
    "Valkey flushed": Fault(("features_misses{remote}",), again=sent("FLUSHALL")),
    # The server closes it again, and goes on with it.
    "directory open to others": Fault(("features_saved{disk}",), folders_mode(0o777), end=folders_mode(0o700)),
    "Valkey read-only": Fault(NO_VALKEY, empty_and_read_only, end=sent("REPLICAOF", "NO", "ONE")),
    "locks held": Fault(NO_DISK, again=hold_locks, end=lambda scene: scene.held.close(), least_s=LEAST_LOCKED_S),
    "Valkey restarted": Fault(NO_VALKEY, again=restart_valkey),
    "all damaged": Fault(NO_FILE, again=damage_all),
}  # fmt: skip
