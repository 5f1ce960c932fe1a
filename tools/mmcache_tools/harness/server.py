# SPDX-License-Identifier: Apache-2.0
"""Starts a vLLM server as a process group of its own, waits until it is healthy, and stops all of it at the end.

Runs in a client process: the demo, a benchmark or a test. `serve` starts `mmcache serve`, as users do. A server must
never leave a process behind: the engine is a child of the server and holds the memory.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_mmcache.base.errors import EnvironmentProblem

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 25

# What makes vLLM run offline on two cores. float32, so that answers can be compared to 1e-3.
# An empty store is one in RAM alone: what the user's own store holds would make one run unlike the next.
CPU_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "MMCACHE_STORE": ""}
CPU_ARGS = (
    "--enforce-eager", "--block-size", "32", "--dtype", "float32", "--max-model-len", "8192",
)  # fmt: skip


@dataclass(frozen=True)
class Server:
    """A healthy server: its address (no trailing slash), its log and its process, the leader of its group."""

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(
    model: Path | str,
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = CPU_ARGS,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """Serve `model` on a free port of this machine until the block ends.

    `env` is laid over the present environment and CPU_ENV. The log is overwritten. Raises:
    EnvironmentProblem, with the end of the log as its note, when the server ends or is not healthy in time.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm_mmcache.cli", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *args]
    with started(command, port, log_path=log_path, env={**CPU_ENV, **(env or {})}, timeout_s=timeout_s) as server:
        yield server


@contextlib.contextmanager
def started(
    command: Sequence[str],
    port: int,
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """Run a command that serves HTTP on `port` of this machine, and answers on /health, until the block ends.

    `env` is laid over the present environment. The log is overwritten. Raises: EnvironmentProblem, with the end of the
    log as its note, when the command ends or is not healthy in time.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log_path, process)
    try:
        wait_until_healthy(server, timeout_s)
        yield server
    finally:
        stop(process)


def wait_until_healthy(server: Server, timeout_s: float) -> None:
    """Return when it is.

    Raises: EnvironmentProblem, with the end of the log as its note, where it ends or is not healthy after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = server.process.poll()
        if status is not None:
            raise failure(server, f"the server ended with status {status} before it was ready")
        if is_healthy(server.url):
            return
        time.sleep(0.25)
    raise failure(server, f"the server was not healthy after {timeout_s:.0f} s")


def is_healthy(url: str) -> bool:
    """Whether /health of the server answers with 200 within 5 s; False where nobody listens."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # URLError too: nobody listens yet, or an answer that is not 200
        return False


def failure(server: Server, what: str) -> EnvironmentProblem:
    """The error for a server that did not do what it should: one line, and the end of its log as a note."""
    lines = server.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    error = EnvironmentProblem(f"{what}: see {server.log_path}")
    error.add_note("\n".join(f"    {line}" for line in lines))
    return error


def stop(process: subprocess.Popen[bytes], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End the whole process group: ask first, then kill what is left of it.

    Waits up to `timeout_s` seconds after each of the two, and for what outlives the leader.
    """
    group = process.pid  # a session of its own: the leader's id is the group's
    for ask in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, ask)
        try:
            process.wait(timeout_s)
            break
        except subprocess.TimeoutExpired:
            continue
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:  # the engine may outlive the server for a moment
        if not living(group):
            return
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def living(group: int) -> list[int]:
    """The processes of a group that still run. Zombies don't count: an orphan's is init's to reap, if ever."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp ...; the name may hold spaces and brackets
            state, _, pgrp = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found
