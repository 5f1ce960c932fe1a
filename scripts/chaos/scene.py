# SPDX-License-Identifier: Apache-2.0
"""What the faults strike: the store's directory, a real Valkey, and the server that uses both.

The directory is a file system of its own where this user may mount one, so that it can be full and read-only. Where
they may not, the faults that need one are left out, and the result says so.
"""

import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.servers import zoo_server
from scripts.chaos.clients import Clients
from tests.features.conftest import Server as Valkey
from vllm_mmcache.demo.server import Server, living

DISK_BYTES = 8 << 20  # of the file system
STORE_BYTES = "2MiB"  # of the features in it, which is less than there are
REMOTE_TIMEOUT_S = 0.5  # the default is for a machine that has a core to spare
# Little stays in RAM that could spare the stores a question, and all of them are asked, also where the tower is faster.
SETTINGS = {
    "MMCACHE_FEATURE_RAM_BYTES": "1MiB",
    "MMCACHE_STORE_DISK_BYTES": STORE_BYTES,
    "MMCACHE_RECORDS_RAM_BYTES": "0",
    "MMCACHE_RECORDS_DISK_BYTES": "1MiB",
    "MMCACHE_MEDIA_RECORDS": "4",
    "MMCACHE_STORE_REMOTE_TIMEOUT_S": str(REMOTE_TIMEOUT_S),
    "MMCACHE_STORE_WAIT_S": "1",
}
# A KV cache and an encoder cache that hold a few of the pictures.
ARGS = (
    *("--max-model-len", "1024", "--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "64"),
    *("--mm-processor-cache-gb", "0.01", "--enable-prompt-tokens-details"),
)
WAYS = ("all", "api server", "engine")
"""Which processes are killed first; the rest has DYING_S to end, then it is killed, too."""
DYING_S = 2.0


class Disk:
    """The store's directory, `place`, below a mount of its own where that is allowed. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "disk"
        self.place = self.root / "store"
        self.ballast = self.root / "ballast"
        self.is_mounted = False

    def __enter__(self) -> Self:
        self.root.mkdir()
        options = f"size={DISK_BYTES},mode=700"
        self.is_mounted = mount("-t", "tmpfs", "-o", options, "mmcache-chaos", str(self.root))
        self.place.mkdir(mode=0o700)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.root)], check=False)

    def make_read_only(self) -> None:
        """For whoever opens a file from now on, root too."""
        if not (mount("--bind", str(self.place), str(self.place)) and mount("-o", "remount,bind,ro", str(self.place))):
            raise OSError(f"{self.place} can't be made read-only")

    def make_writable(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.place)], check=True)

    def files(self, *patterns: str) -> list[Path]:
        """Files of the store that match one of the patterns; those used last come last."""
        found = {}
        for path in (path for pattern in patterns for path in self.place.glob(pattern)):
            with suppress(OSError):  # gone meanwhile
                found[path] = path.stat().st_mtime
        return sorted(found, key=lambda path: found[path])


def mount(*arguments: str) -> bool:
    """Whether it was done."""
    with suppress(OSError):
        return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
    return False


class Scene:
    """Directory, Valkey and server together. `disk` and `valkey` are there from the start, a server after `start`."""

    def __init__(self, model: Path, disk: Disk, valkey: Valkey, clients: Clients) -> None:
        self.disk = disk
        self.valkey = valkey
        self.clients = clients
        self._model = model
        self._stack = ExitStack()
        self.server: Server | None = None
        self.starts_s: list[float] = []

    def start(self) -> Server:
        """A new server, healthy. The clients are not told so. Raises: EnvironmentProblem where it does not start."""
        env = {**SETTINGS, "MMCACHE_STORE": f"{self.disk.place} {self.valkey.url}"}
        start = time.monotonic()
        self.server = self._stack.enter_context(zoo_server(self._model, "mmcache", images=1, args=ARGS, env=env))
        self.starts_s.append(round(time.monotonic() - start, 1))
        return self.server

    def kill(self, way: str) -> None:
        """End the server as `way` says, without a word to it."""
        assert self.server is not None
        self.clients.down()
        leader = self.server.process.pid
        for pid in living(leader):
            if way == "all" or (way == "api server") == (pid == leader):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + DYING_S
        while living(leader) and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        self._stack.close()
        self.server = None

    def close(self) -> None:
        if self.server is not None:
            self.clients.down()
        self._stack.close()
        self.server = None
