# SPDX-License-Identifier: Apache-2.0
"""`mmcache store` as users run it, on a directory that a server may be using."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.packages import (
    BUDGET_BYTES,
    SHAPE,
    features,
    file_tier,
    held_bytes,
    identity,
    packed,
    redis_tier,
    save,
)
from tests.support.store_server import Server, running_server, server
from tests.support.tiers import record_tier
from tests.system.cli.test_commands import assert_one_line, mmcache
from vllm_mmcache.cli import serve
from vllm_mmcache.components.features import tiers
from vllm_mmcache.components.features.tiers import FEATURES, key_of
from vllm_mmcache.storage import frame, sqlite_file
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.redis_backend import INCOMING, RedisBackend
from vllm_mmcache.storage.tier import Tier

__all__ = ["running_server", "server"]


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    """A store of four packages, one of them with an id that a terminal would obey."""
    filled = file_tier(tmp_path / "store")
    for number in (0, 1, 2, "\x1b[31m"):
        assert tiers.save(filled, identity(number), SHAPE, features())
    return filled


@pytest.fixture
def files(tier: Tier) -> FileBackend:
    """The files of that store."""
    assert isinstance(tier.backend, FileBackend)
    return tier.backend


@pytest.mark.process
def test_ls(tier: Tier, files: FileBackend, tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    shown = mmcache("store", "ls", "--dir", place)
    assert shown.returncode == 0, shown.stderr
    assert "4 packages" in shown.stdout
    assert "[16, 64]" in shown.stdout
    assert "\x1b" not in shown.stdout
    packages = json.loads(mmcache("store", "ls", "--json", MMCACHE_STORE=place).stdout)["packages"]
    assert {line["content_id"] for line in packages} == {f"image-{number}" for number in (0, 1, 2, "\x1b[31m")}
    assert packages[0].keys() == {"key", "num_bytes", "used", "content_id", "model", "dtype", "layout", "shape"}


@pytest.mark.process
def test_check(tier: Tier, files: FileBackend, tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    good = mmcache("store", "check", "--dir", place)
    assert good.returncode == 0
    assert good.stdout == "4 packages are good, 0 files were set aside\n0 records are good, 0 were removed\n"
    path = files.path_of(key_of(identity(0)))
    path.write_bytes(path.read_bytes()[:-1])
    files.path_of(key_of(identity(1))).write_bytes(packed(2))
    found = mmcache("store", "check", "--dir", place, "--json")
    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert report["good"] == 2
    assert {finding["key"] for finding in report["set_aside"]} == {identity(0).key, identity(1).key}
    assert len(list(files.aside())) == 2
    assert mmcache("store", "check", "--dir", place).returncode == 0


@pytest.mark.process
def test_gc_and_clear(tier: Tier, files: FileBackend, tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    (files.root / "incoming").write_bytes(b"of a killed writer")
    swept = mmcache("store", "gc", "--dir", place, "--json", MMCACHE_STORE_DISK_BYTES="6000")
    assert swept.returncode == 0, swept.stderr
    assert json.loads(swept.stdout)["held_bytes"] == held_bytes(tmp_path) <= 6000
    assert not (files.root / "incoming").exists()
    cleared = mmcache("store", "clear", "--dir", place)
    assert (cleared.returncode, list(tmp_path.iterdir())) == (0, [])
    assert save(tier, 0)  # a server that runs goes on
    assert "1 packages" in mmcache("store", "ls", "--dir", place).stdout


@pytest.mark.process
def test_records(tmp_path: Path) -> None:
    """They are listed, checked, shrunk and cleared with the features, and where there are no features, too."""
    place = str(tmp_path / "store")
    kept = record_tier(place, BUDGET_BYTES)
    keys = [frame.key("test", str(number)) for number in range(400)]
    kept.put_many(dict.fromkeys(keys, b"value" * 100))
    assert "400 records" in mmcache("store", "ls", "--dir", place).stdout
    listed = json.loads(mmcache("store", "ls", "--dir", place, "--json").stdout)["records"]
    assert listed == {"num": 400, "num_bytes": kept.backend.sizes()[1]}
    assert "400 records are good, 0 were removed" in mmcache("store", "check", "--dir", place).stdout
    kept.backend.put_many({keys[0]: b"planted"})
    found = mmcache("store", "check", "--dir", place, "--json")
    assert found.returncode == 1, found.stderr
    assert json.loads(found.stdout)["records"] == {"good": 399, "removed": 1}
    swept = mmcache("store", "gc", "--dir", place, "--json", MMCACHE_RECORDS_DISK_BYTES="100000")
    assert swept.returncode == 0, swept.stderr
    assert json.loads(swept.stdout)["records"]["evicted"] > 100
    assert held_bytes(tmp_path) <= 100_000
    kept.close()
    folder = tmp_path / "store" / "records"
    (folder / str(sqlite_file.current(folder))).write_bytes(b"no database" * 1000)
    damaged = mmcache("store", "check", "--dir", place, "--json")
    assert damaged.returncode == 1, damaged.stderr
    assert "no database" in json.loads(damaged.stdout)["set_aside"][0]["why"]
    kept.put_many({keys[0]: b"value"})
    assert mmcache("store", "clear", "--dir", place).returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert kept.get(keys[0], bytes) is None


@pytest.mark.process
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["clear", "--dir", "/no/such/store"], "there is no store in /no/such/store"),
        (["check", "--dir", "/etc"], "there is no store in /etc"),
        (["gc", "--dir"], "--dir"),
        (["shrink"], "shrink"),
    ],
)
def test_mistakes(args: list[str], said: str) -> None:
    assert_one_line(mmcache("store", *args), said)


@pytest.mark.process
@pytest.mark.parametrize("verb", ["ls", "check", "gc", "clear"])
def test_none_is_asked_for(verb: str) -> None:
    assert_one_line(mmcache("store", verb, MMCACHE_STORE=""), "MMCACHE_STORE asks for no store: use --dir PATH")


@pytest.mark.process
def test_a_store_of_others_is_not_touched(tier: Tier, files: FileBackend, tmp_path: Path) -> None:
    files.root.rename(tmp_path / "elsewhere")
    files.root.symlink_to(tmp_path / "elsewhere")
    assert_one_line(mmcache("store", "clear", "--dir", str(tmp_path / "store")), "expected a directory drwx------")


@pytest.mark.process
def test_the_directory_of_serve_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `mmcache serve` keeps unasked is listed, checked, swept and cleared without an argument."""
    environ: dict[str, Any] = {"XDG_CACHE_HOME": str(tmp_path)}
    with monkeypatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path))
        patched.setenv("MMCACHE_STORE", "")  # so that what serve sets is taken back
        patched.delenv("MMCACHE_STORE")
        assert serve.keep_features([])
        place = os.environ["MMCACHE_STORE"]
    assert_one_line(mmcache("store", "ls", **environ), f"there is no store in {place}")
    assert mmcache("store", "clear", **environ).stdout == "0 files removed\n"
    assert save(file_tier(place), 0)
    assert "1 packages" in mmcache("store", "ls", **environ).stdout
    assert "1 packages are good" in mmcache("store", "check", **environ).stdout
    assert mmcache("store", "gc", **environ).stdout.startswith("0 files evicted")
    assert mmcache("store", "clear", **environ).stdout == "1 files removed\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_gc_removes_what_was_not_used(tier: Tier, files: FileBackend, tmp_path: Path) -> None:
    path = files.path_of(key_of(identity(0)))
    os.utime(path, (1000, 1000))
    for ttl, removed in (("0", 0), ("7d", 1)):
        swept = mmcache("store", "gc", "--dir", str(tmp_path / "store"), "--json", MMCACHE_STORE_TTL=ttl)
        assert json.loads(swept.stdout)["evicted"] == removed, swept.stderr
    assert not path.exists()


@pytest.mark.process
def test_clear_leaves_what_is_not_ours(tier: Tier, files: FileBackend, tmp_path: Path) -> None:
    strangers = [tmp_path / "store" / "notes.txt", files.root / "mine" / "notes.txt"]
    for stranger in strangers:
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_text("mine")
    assert mmcache("store", "clear", "--dir", str(tmp_path / "store")).returncode == 0
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(strangers)


@pytest.fixture
def both(server: Server, tmp_path: Path) -> dict[str, Any]:
    """The variables of a store in a directory and in Valkey, each with one package and one record; and others' keys."""
    key = frame.key("test", "a")
    for tier in (file_tier(tmp_path / "store"), redis_tier(server.url, ttl_s=3600, timeout_s=60)):
        assert save(tier, 0)
    remote = RedisBackend(server.url, RECORDS, ttl_s=3600, timeout_s=60, max_bytes=BUDGET_BYTES)
    for kept in (record_tier(tmp_path / "store"), Tier(RECORDS, remote)):
        kept.put_many({key: b"value"})
        kept.close()
    server.client.set("others:mmcache", "theirs")
    return {"MMCACHE_STORE": f"{tmp_path / 'store'} {server.url}"}


def test_valkey_is_listed_checked_and_cleared(server: Server, tmp_path: Path, both: dict[str, Any]) -> None:
    sizes = {"packages": {"num": 1, "num_bytes": len(packed())}, "records": {"num": 1, "num_bytes": 42}}
    listed = json.loads(mmcache("store", "ls", "--json", **both).stdout)
    assert listed["remote"] == sizes
    assert len(listed["packages"]) == 1
    alone: dict[str, Any] = {"MMCACHE_STORE": server.url}
    assert json.loads(mmcache("store", "ls", "--json", **alone).stdout) == {"packages": [], "remote": sizes}
    assert "2 entries are good, 0 were removed" in mmcache("store", "check", **both).stdout

    packages, records = FEATURES.remote_prefix, RECORDS.remote_prefix
    server.client.set(packages + identity(1).key, packed(0))
    server.client.set(records + frame.key("test", "b").hex(), b"no record")
    server.client.set(records.encode() + b"\xff\n", b"not a name of ours")
    server.client.set(packages + INCOMING + "a", b"on its way")
    found = mmcache("store", "check", "--json", **alone)
    assert (found.returncode, json.loads(found.stdout)["remote"]) == (1, {"good": 2, "removed": 2})
    assert server.client.exists(packages + INCOMING + "a", records.encode() + b"\xff\n") == 2

    assert mmcache("store", "clear", "--dir", str(tmp_path / "store")).returncode == 0
    assert server.client.dbsize() == 5  # --dir is that directory alone
    server.client.set(b"mmcache:features:1:\xff", b"of an older version")
    assert mmcache("store", "ls", **alone).returncode == 0
    server.client.mset({f"{records}{number}": b"x" for number in range(2000)})
    cleared = mmcache("store", "clear", **both)
    assert cleared.stdout == f"0 files removed\n{server.url}: 2005 entries removed\n", cleared.stderr
    assert server.client.keys("*") == [b"others:mmcache"]


@pytest.mark.process
@pytest.mark.parametrize("verb", ["ls", "check", "clear"])
def test_a_valkey_that_does_not_answer(verb: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store = f"redis://user:secret@127.0.0.1:{port}"
    assert_one_line(mmcache("store", verb, MMCACHE_STORE=store), f"redis://***@127.0.0.1:{port}", "is it running")


@pytest.mark.process
def test_a_variable_that_is_no_setting_is_said_and_stops_nothing(
    tier: Tier, files: FileBackend, tmp_path: Path
) -> None:
    done = mmcache("store", "gc", "--dir", str(tmp_path / "store"), MMCACHE_STORE_DISK_BYTE="1")
    assert done.returncode == 0
    assert "0 files evicted" in done.stdout
    assert done.stderr.splitlines() == [
        "mmcache: MMCACHE_STORE_DISK_BYTE is no setting and has no effect: did you mean MMCACHE_STORE_DISK_BYTES?"
    ]
