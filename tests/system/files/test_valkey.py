# SPDX-License-Identifier: Apache-2.0
"""Files in a real Valkey or Redis, beside what else lies there."""

import logging
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.store_server import Server
from vllm_mmcache.base.durations import Duration
from vllm_mmcache.base.errors import FilesUnusable, SettingsError
from vllm_mmcache.base.settings import Settings, load_settings
from vllm_mmcache.files.access import REST_S
from vllm_mmcache.files.redis_filesystem import AT_ONCE
from vllm_mmcache.files.store import ENTRY_BYTES, FileInfo, FileLost, FileStore, QuotaExceeded
from vllm_mmcache.storage.encryption import AesGcmCodec

pytestmark = pytest.mark.process

PAGE = (Path(__file__).parents[3] / "docs" / "operate.md").read_text()
(RULE,) = re.findall(r"^ +ACL SETUSER mmcache-files (on >PASSWORD [^\\\n]*(?:\\\n[^\\\n]*)*)$", PAGE, re.MULTILINE)
RIGHTS = [word for word in RULE.replace("\\\n", " ").split() if word != ">PASSWORD"]

ALICE, BOB = b"a" * 32, b"b" * 32
CONTENT = bytes(range(256)) * 4096  # a mebibyte
TTL_S = 3600


def kept(store: FileStore, tenant: bytes | None = ALICE, content: bytes = CONTENT, **more: Any) -> FileInfo:
    given = {"filename": "a.png", "purpose": "vision", "media_type": "image/png", **more}
    return store.put(tenant, content, **given)


def opened(server: Server, below: str = "", **more: Any) -> FileStore:
    return FileStore.of(Settings(files=server.url, files_ttl=Duration(TTL_S), **more), below)


def test_kept_found_and_removed(server: Server) -> None:
    server.client.set("somebody else's", "1")
    store, other = opened(server), opened(server)
    info = kept(store)
    assert kept(other).id == info.id
    assert other.read(ALICE, info) == CONTENT
    assert [one.id for one in other.files_of(ALICE)] == [info.id]
    assert other.find(BOB, info.id) is None
    assert other.files_of(BOB) == []
    assert not other.delete(BOB, info.id)
    second = kept(store, content=CONTENT[::-1])
    assert kept(opened(server, "named")).id == info.id, "which knows no file of the others"
    assert other.delete(ALICE, info.id)
    assert store.find(ALICE, info.id) is None
    assert [one.id for one in store.files_of(ALICE)] == [second.id]
    assert store.sweep() == 0
    assert store.delete(ALICE, second.id)
    assert opened(server, "named").find(ALICE, info.id) is not None
    assert len(server.client.keys("*")) == 2, "the named one's hash, and somebody else's"


def test_many_are_listed(server: Server) -> None:
    """In several questions to the server."""
    store = opened(server, files_quota=1 << 30)
    infos = [kept(store, content=b"%d" % number) for number in range(AT_ONCE + 3)]
    assert {one.id for one in store.files_of(ALICE)} == {one.id for one in infos}
    assert store.delete(ALICE, infos[0].id)
    assert len(store.files_of(ALICE)) == AT_ONCE + 2


def test_other_names_of_the_server_are_not_looked_at(server: Server) -> None:
    """Only a sweep asks for all of them, also where a tenant has no file yet."""

    def num_scans() -> int:
        return int(server.client.info("commandstats").get("cmdstat_scan", {}).get("calls", 0))

    before, store = num_scans(), opened(server)
    assert store.files_of(BOB) == []
    kept(store)
    assert num_scans() == before
    store.sweep()
    assert num_scans() > before, "the control"


def test_quota(server: Server) -> None:
    store = opened(server, files_quota=2 * (len(CONTENT) + ENTRY_BYTES) + 100)
    first = kept(store)
    kept(store, content=CONTENT[::-1])
    kept(store)
    with pytest.raises(QuotaExceeded):
        kept(store, content=CONTENT[:-1])
    kept(store, BOB)
    assert store.delete(ALICE, first.id)
    kept(store, content=CONTENT[:-1])


def test_files_expire(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one as anywhere; and all that a tenant has, also where no server takes an upload any more."""
    store = opened(server)
    info = kept(store)
    kept(store, BOB)
    (alice, bob) = server.client.keys("*")
    assert {0 < server.client.ttl(key) <= TTL_S for key in (alice, bob)} == {True}
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + TTL_S + 1)
    assert store.find(ALICE, info.id) is None
    kept(store, BOB)
    assert store.sweep() == 0, "this clock is not the server's"
    monkeypatch.setattr(store, "_is_clock_right", lambda: True)
    assert store.sweep() == 1
    assert len(server.client.keys("*")) == 1
    forever = FileStore.of(Settings(files=server.url, files_ttl=Duration(0)))
    kept(forever, BOB)
    assert [server.client.ttl(key) for key in server.client.keys("*")] == [-1]


def test_encrypted_files_show_nothing(server: Server) -> None:
    store = opened(server)
    store._codec = AesGcmCodec(b"k" * 32)
    info = kept(store, filename="passport.png")
    assert store.read(ALICE, info) == CONTENT
    for key in server.client.keys("*"):
        stored = [key, *(part for item in server.client.hgetall(key).items() for part in item)]
        for secret in (CONTENT[:256], b"passport", info.id.removeprefix("file-").encode(), ALICE.hex().encode()):
            assert not [part for part in stored if secret in part]


def test_content_that_was_changed(server: Server) -> None:
    store = opened(server)
    info = kept(store)
    (key,) = server.client.keys("*")
    (name,) = (name for name in server.client.hkeys(key) if not name.endswith(b".json"))
    server.client.hset(key, name, CONTENT[:-1] + b"?")
    with pytest.raises(FileLost, match="is damaged: upload it again"):
        store.read(ALICE, info)


def test_a_server_that_is_gone(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left alone for a while, then tried again; nothing secret of its URL is said, of writing and of reading."""
    url = server.url.replace("redis://", "redis://user:a-password-of-this-test@")
    store = FileStore.of(Settings(files=url))
    with caplog.at_level(logging.WARNING):
        for call in (lambda: kept(store), lambda: store.files_of(ALICE)):
            with pytest.raises(FilesUnusable, match="ask again later"):
                call()
    assert len(caplog.records) == 2
    assert "a-password" not in caplog.text
    assert all("password pair or" in record.getMessage() for record in caplog.records), "what the server says is there"
    server.client.acl_setuser(
        "user", enabled=True, passwords=["+a-password-of-this-test"], commands=["+@all"], keys=["*"]
    )
    try:
        now = time.monotonic()
        monkeypatch.setattr("time.monotonic", lambda: now + REST_S[0])
        assert store.read(ALICE, kept(store)) == CONTENT
    finally:
        server.client.acl_deluser("user")


def denied(server: Server, *without: str) -> set[str]:
    """Do all that is done with files, as a user by the documented rule without these rights; what was refused."""
    rights = [right for right in RIGHTS if right not in without]
    server.client.execute_command("ACL SETUSER", "mmcache-files", "reset", ">secret", *rights)
    server.client.acl_log_reset()
    url = server.url.replace("redis://", "redis://mmcache-files:secret@")
    try:
        for ttl_s in TTL_S, 0:
            for work in (
                lambda store: store.delete(ALICE, kept(store).id),
                lambda store: store.read(ALICE, kept(store)),
                lambda store: store.sweep(),
            ):  # each with a store that does not rest after what another one was refused
                with suppress(FilesUnusable):
                    work(FileStore.of(Settings(files=url, files_ttl=Duration(ttl_s))))
        refused = {str(entry["object"]) for entry in server.client.acl_log()}
        return refused - {"client|setinfo"}  # with which redis-py says its version
    finally:
        server.client.acl_deluser("mmcache-files")


def test_the_documented_rights_are_enough(server: Server) -> None:
    assert denied(server) == set()


@pytest.mark.parametrize("right", [right for right in RIGHTS if right.startswith("+") and "cluster" not in right])
def test_each_documented_right_is_needed(server: Server, right: str) -> None:
    assert denied(server, right) == {right.removeprefix("+")}


@pytest.mark.parametrize("url", ["redis://host:port", "redis://host?nonsense=1"])
def test_a_url_that_can_not_be_meant(url: str) -> None:
    with pytest.raises(SettingsError, match=r"mmcache\.files"):
        load_settings({"files": url})
