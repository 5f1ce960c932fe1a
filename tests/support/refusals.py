# SPDX-License-Identifier: Apache-2.0
"""What a process on a real system meets: no threads, files that can't grow or that others spoil, other mounts."""

import ctypes
import os
import resource
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CAPABILITY_VERSION = 0x20080522
_CAP_DAC_OVERRIDE = 1


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes within: writing fails, as on a disk that is full. Of the whole process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started within, as on a machine at its limit."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        yield


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """This thread can't change what is in the folder, nor anything below it, within."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        with _without_root():
            yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@contextmanager
def _without_root() -> Iterator[None]:
    """Modes count for this thread, as for any user."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice

    def ask(function: str) -> None:
        if getattr(libc, function)(header, sets):
            raise OSError(ctypes.get_errno(), function)

    ask("capget")
    effective = sets[0]
    sets[0] = effective & ~(1 << _CAP_DAC_OVERRIDE)
    ask("capset")
    try:
        yield
    finally:
        sets[0] = effective
        ask("capset")


SPOIL: dict[str, Callable[[Path], object]] = {
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "removed": lambda path: path.unlink(),
    "garbled": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "replaced": lambda path: (path.unlink(), path.write_bytes(b"x" * 40_000)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}
"""What others may do to a file that is in use."""

_UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]


def in_namespace(mount: str, command: list[str]) -> "subprocess.Popen[str]":
    """A process that has mounts of its own, made by the shell line `mount`."""
    if shutil.which("unshare") is None or subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no user mount anything in a namespace of its own")
    return subprocess.Popen(
        [*_UNSHARE, f'{mount}; exec "$0" "$@"', *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
