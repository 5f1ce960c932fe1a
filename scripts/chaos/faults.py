# SPDX-License-Identifier: Apache-2.0
"""The faults, each under its name: how it begins, what is done again and again while it is in force, how it ends.

What a fault destroys stays destroyed when it ends; what it keeps from working works again. Each names the counters of
/metrics of which one has to grow while it is in force: otherwise it has not reached the server, and says nothing.
"""

import fcntl
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from scripts.chaos.scene import REMOTE_TIMEOUT_S, Scene

Act = Callable[[Scene, random.Random], None]

EVERY_S = 0.2
PACKAGES = "features/??/*.safetensors"
DATABASE = ("records/*.sqlite", "records/*.sqlite-wal")
KEYS = "mmcache:*"

LEAST_LOCKED_S = 8.0  # the server waits 5 s for a lock
FULL_BYTES = "2mb"  # less than Valkey takes with nothing in it

_kept: dict[str, list[object]] = {}  # what a fault holds open, by its name


def nothing(scene: Scene, chance: random.Random) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Fault:
    """See above. `seen`: names of counters as in /metrics, without `mmcache:` and `_total`."""

    what: str
    seen: tuple[str, ...]
    begin: Act = nothing
    again: Act = nothing
    end: Act = nothing
    needs_mount: bool = False
    least_s: float = 0.0
    """Seconds before which it can't leave a trace."""


@contextmanager
def in_force(fault: Fault, scene: Scene, seed: int) -> Iterator[None]:
    """The fault, from the begin to the end of the block, in which another thread goes on with it."""
    chance = random.Random(seed)
    ended = threading.Event()
    fault.begin(scene, chance)

    def go_on() -> None:
        while not ended.wait(EVERY_S):
            with suppress(OSError, redis.RedisError, sqlite3.Error):  # the server changes the same things
                fault.again(scene, chance)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        fault.end(scene, chance)


def some(found: list[Path], chance: random.Random) -> list[Path]:
    """A quarter of them, one at least if there is one."""
    return chance.sample(found, -(-len(found) // 4))


def truncate(scene: Scene, chance: random.Random) -> None:
    """Cut packages, the database and its log, somewhere."""
    for path in (*some(scene.disk.files(PACKAGES), chance), *scene.disk.files(*DATABASE)):
        with suppress(OSError):
            os.truncate(path, chance.randrange(path.stat().st_size + 1))


def flip(scene: Scene, chance: random.Random) -> None:
    """Change bytes in place: a few in a package, more in the database and its log."""
    for path, number in (
        *((path, 3) for path in some(scene.disk.files(PACKAGES), chance)),
        *((path, 50) for path in scene.disk.files(*DATABASE)),
    ):
        with suppress(OSError, ValueError), path.open("r+b") as file:
            for _ in range(number):
                at = chance.randrange(path.stat().st_size)  # ValueError: it is empty
                file.seek(at)
                (old,) = file.read(1) or b"\0"
                file.seek(at)
                file.write(bytes([old ^ chance.randrange(1, 256)]))


def exchange_files(scene: Scene, chance: random.Random) -> None:
    """Put packages of other pictures, each whole, under a package's name."""
    found = scene.disk.files(PACKAGES)
    for path in some(found, chance):
        with suppress(OSError):
            content = chance.choice(found).read_bytes()
            path.with_suffix(".other").write_bytes(content)
            path.with_suffix(".other").rename(path)


def remove(scene: Scene, chance: random.Random) -> None:
    for folder in ("features", "records"):
        shutil.rmtree(scene.disk.place / folder, ignore_errors=True)


def fill_disk(scene: Scene, chance: random.Random) -> None:
    """To the last byte, and again whenever the server has made room."""
    with scene.disk.ballast.open("ab", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def replace_by_file(scene: Scene, chance: random.Random) -> None:
    scene.disk.place.rename(scene.disk.root / "away")
    scene.disk.place.write_text("This was a directory.\n")


def put_back(scene: Scene, chance: random.Random) -> None:
    scene.disk.place.unlink()
    (scene.disk.root / "away").rename(scene.disk.place)


def folders_mode(mode: int) -> Act:
    def set_mode(scene: Scene, chance: random.Random) -> None:
        for folder in ("features", "records"):
            with suppress(FileNotFoundError):
                (scene.disk.place / folder).chmod(mode)

    return set_mode


def hold_locks(scene: Scene, chance: random.Random) -> None:
    """Those of the packages and of the database, as a process that hangs would."""
    kept = _kept.setdefault("locks", [])
    place = scene.disk.place / "features" / "lock"
    if place.exists():
        lock = place.open("r+b")
        kept.append(lock)
        with suppress(BlockingIOError):  # the server has it for a moment; the next round gets it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for path in scene.disk.files(DATABASE[0])[-1:]:
        connection = sqlite3.connect(path, timeout=0.1, check_same_thread=False, isolation_level=None)
        kept.append(connection)
        connection.execute("BEGIN IMMEDIATE")


def let_go_of_locks(scene: Scene, chance: random.Random) -> None:
    for one in _kept.pop("locks", []):
        with suppress(sqlite3.Error):
            one.close()  # type: ignore[attr-defined]


def slow_valkey(scene: Scene, chance: random.Random) -> None:
    """It sleeps most of the time."""
    os.kill(scene.valkey.pid, signal.SIGSTOP)
    time.sleep(chance.random() * 4 * REMOTE_TIMEOUT_S)
    os.kill(scene.valkey.pid, signal.SIGCONT)


def restart_valkey(scene: Scene, chance: random.Random) -> None:
    scene.valkey.kill()
    time.sleep(EVERY_S)
    scene.valkey.start()


def plant_garbage(scene: Scene, chance: random.Random) -> None:
    """Noise, nothing at all, a piece of what was there, and other types, under our names."""
    client = scene.valkey.client
    for name in client.scan_iter(KEYS, count=1000):
        kind = chance.randrange(5)
        if kind == 0:
            client.set(name, chance.randbytes(chance.randrange(1, 100_000)))
        elif kind == 1:
            client.setrange(name, chance.randrange(1000), chance.randbytes(16))
        elif kind == 2:
            client.set(name, client.getrange(name, 0, chance.randrange(1000)))
        elif kind == 3:
            client.delete(name)
            client.rpush(name, "a", "b")


def exchange_values(scene: Scene, chance: random.Random) -> None:
    """Put what is whole under the name of another."""
    client = scene.valkey.client
    names = list(client.scan_iter(KEYS, count=1000))
    chance.shuffle(names)
    for name, other in zip(names[::2], names[1::2], strict=False):
        client.copy(other, name, replace=True)


def damage_all(scene: Scene, chance: random.Random) -> None:
    chance.choice((truncate, flip, exchange_files))(scene, chance)
    chance.choice((plant_garbage, exchange_values))(scene, chance)


NO_FILE = ("features_set_aside", "record_corrupt", "record_errors")
NO_DISK = ("features_errors{disk}", "record_errors{disk}", "record_dropped{disk}")
NO_VALKEY = ("features_errors{remote}", "record_errors{remote}")
NO_VALUE = ("features_set_aside{remote}", "record_corrupt{remote}")
LOST_FILE = ("features_set_aside{disk}",)


def signalled(number: int) -> Act:
    return lambda scene, chance: os.kill(scene.valkey.pid, number)


def sent(*command: str | int) -> Act:
    """Valkey is sent a command."""
    return lambda scene, chance: scene.valkey.client.execute_command(*command)


def kill(scene: Scene, chance: random.Random) -> None:
    scene.valkey.kill()


def start(scene: Scene, chance: random.Random) -> None:
    scene.valkey.start()


# Those of the directory and those of Valkey in turn: what failed is left alone for a while, and would hide the next.
FAULTS: dict[str, Fault] = {
    "nothing": Fault("the control", ("features_hits{disk}", "features_hits{remote}")),
    "files truncated": Fault("packages, the database and its log, cut somewhere", LOST_FILE, again=truncate),
    "Valkey stopped": Fault("SIGSTOP: it takes connections and never answers", NO_VALKEY, signalled(signal.SIGSTOP),
                            end=signalled(signal.SIGCONT)),
    "files corrupted": Fault("bytes changed in place", LOST_FILE, again=flip),
    "Valkey killed": Fault("nobody listens at its port", NO_VALKEY, kill, end=start),
    "disk full": Fault("no byte is left", NO_DISK, again=fill_disk, needs_mount=True,
                       end=lambda scene, chance: scene.disk.ballast.unlink(missing_ok=True)),
    "Valkey slow": Fault("it sleeps, again and again, mostly longer than the server waits for it", NO_VALKEY,
                         again=slow_valkey),
    "files exchanged": Fault("whole packages of other pictures", LOST_FILE, again=exchange_files),
    "garbage in Valkey": Fault("noise, pieces and other types under our names", NO_VALUE, again=plant_garbage),
    "directory read-only": Fault("a mount, which binds root, too", NO_DISK, needs_mount=True,
                                 begin=lambda scene, chance: scene.disk.make_read_only(),
                                 end=lambda scene, chance: scene.disk.make_writable()),
    "values exchanged": Fault("what is whole, under names of others", NO_VALUE, again=exchange_values),
    "files removed": Fault("features and records, again and again", ("features_misses{disk}",), again=remove),
    "Valkey full": Fault("maxmemory, and nothing may go", NO_VALKEY, sent("CONFIG SET", "maxmemory", FULL_BYTES),
                         end=sent("CONFIG SET", "maxmemory", 0)),
    "a file for the directory": Fault("what root can't write to, either", NO_DISK, replace_by_file, end=put_back),
    "Valkey flushed": Fault("again and again", ("features_misses{remote}",), again=sent("FLUSHALL")),
    "directory open to others": Fault("mode 0777: it is not to be trusted", NO_DISK, folders_mode(0o777),
                                      end=folders_mode(0o700)),
    "Valkey read-only": Fault("it follows a server that is not there: what it holds may be read, and nothing written",
                              NO_VALKEY, sent("REPLICAOF", "127.0.0.1", "1"), end=sent("REPLICAOF", "NO", "ONE")),
    "locks held": Fault("those of packages and database, by a process that hangs", NO_DISK, again=hold_locks,
                        end=let_go_of_locks, least_s=LEAST_LOCKED_S),
    "Valkey restarted": Fault("killed and started, again and again", NO_VALKEY, again=restart_valkey),
    "all damaged": Fault("files and values, in all these ways", NO_FILE, again=damage_all),
}  # fmt: skip
