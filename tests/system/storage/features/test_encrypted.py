# SPDX-License-Identifier: Apache-2.0
"""Features and records that are encrypted where they lie: nothing of them can be read there.

What was planted, moved, changed or encrypted with another key is a miss that is counted.
"""

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_mmcache.components.features.disk import DiskTier
from vllm_mmcache.components.features.lasting import LastingTier, name_of
from vllm_mmcache.components.features.remote import PREFIX, RemoteTier
from vllm_mmcache.storage.records import MAX_VALUE_BYTES, Records
from vllm_mmcache.storage.records.disk import DiskPlace
from vllm_mmcache.storage.records.place import Place
from vllm_mmcache.storage.records.ram import Entry
from vllm_mmcache.storage.records.remote import PREFIX as RECORDS
from vllm_mmcache.storage.records.remote import RemotePlace

from tests.support.packages import BUDGET_BYTES, SHAPE, features, identity, load, packed, save
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S
from tests.system.cli.test_commands import mmcache
from vllm_mmcache.base.settings import load_settings
from vllm_mmcache.components.features.engine.store import open_tiers
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.storage import records
from vllm_mmcache.storage.encryption import CHUNK_BYTES, PLAIN, AesGcmCodec, PlainCodec

KEY, OTHER = AesGcmCodec(b"k" * 32), AesGcmCodec(b"o" * 32)
LARGE = Shape(4096, 1536, "bfloat16")  # twelve chunks
RECORD = records.key("test", "a")


class Kept:
    """A tier and where its entries lie, as bytes that a test changes."""

    def __init__(self, opened: Callable[[PlainCodec], LastingTier], read: Callable, write: Callable) -> None:  # type: ignore[type-arg]
        self.opened, self.read, self.write = opened, read, write


@pytest.fixture(params=["disk", "remote"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    if request.param == "disk":
        directory = DiskTier(tmp_path, BUDGET_BYTES).directory

        def write(name: str, content: bytes) -> None:
            directory.path_of(name).parent.mkdir(exist_ok=True)
            directory.path_of(name).write_bytes(content)

        return Kept(
            lambda key: DiskTier(tmp_path, BUDGET_BYTES, codec=key),
            lambda name: directory.path_of(name).read_bytes(),
            write,
        )
    server: Server = request.getfixturevalue("server")
    return Kept(
        lambda key: RemoteTier(server.url, ttl_s=100, max_bytes=BUDGET_BYTES, timeout_s=TIMEOUT_S, codec=key),
        lambda name: server.client.get(PREFIX + name),
        lambda name, content: server.client.set(PREFIX + name, content),
    )


def counts(tier: LastingTier) -> tuple[float, ...]:
    seen = tier.counters.snapshot()
    return seen["hits"], seen["misses"], seen["set_aside"], seen["errors"]


@pytest.mark.process
@pytest.mark.parametrize("shape", [SHAPE, LARGE])
def test_there_and_back(kept: Kept, shape: Shape) -> None:
    tier = kept.opened(KEY)
    assert save(tier, 0, shape)
    assert load(kept.opened(KEY), 0, shape) == features(0, shape)
    assert tier.counters.snapshot()["saved_bytes"] == KEY.num_bytes(len(packed(0, shape)))
    assert save(tier, 0, shape)  # it is there
    assert tier.counters.snapshot()["saved"] == 1
    lies = kept.read(name_of(identity(0), KEY))
    whole = packed(0, shape)
    assert len(lies) == KEY.num_bytes(len(whole))
    for start in range(0, len(whole) - 32, max(32, len(whole) // 100)):
        assert whole[start : start + 32] not in lies
    for text in (b"image-0", b"weights", b"safetensors", b"shape", identity(0).key.encode()):
        assert text not in lies
    assert identity(0).key != name_of(identity(0), KEY)


@pytest.mark.process
def test_others_have_a_plain_miss(kept: Kept) -> None:
    """Without the key, or with another one: another name, so nobody takes away what is not his."""
    assert save(kept.opened(KEY), 0)
    for key in (PLAIN, OTHER):
        tier = kept.opened(key)
        assert load(tier, 0) is None
        assert counts(tier) == (0, 1, 0, 0)
        assert save(tier, 0)
        assert load(tier, 0) == features(0)
    assert load(kept.opened(KEY), 0) == features(0)


MIDDLE = CHUNK_BYTES * 2 + 100
PLANTED: dict[str, Callable[[Kept, bytes], bytes]] = {
    "in the clear": lambda kept, entry: packed(0, LARGE),
    "of another name": lambda kept, entry: kept.read(name_of(identity(1), KEY)),
    "encrypted with another key": lambda kept, entry: OTHER.encrypt(
        bytes.fromhex(name_of(identity(0), KEY)), packed(0, LARGE)
    ),
    "a bit flipped": lambda kept, entry: entry[:MIDDLE] + bytes([entry[MIDDLE] ^ 1]) + entry[MIDDLE + 1 :],
    "truncated": lambda kept, entry: entry[:MIDDLE],
    "longer": lambda kept, entry: entry + b"x",
    "nearly nothing": lambda kept, entry: entry[:3],
    "garbage": lambda kept, entry: b"\xff" * len(entry),
}


@pytest.mark.process
@pytest.mark.parametrize("plant", PLANTED)
def test_what_was_planted_is_a_miss(kept: Kept, plant: str) -> None:
    for number in (0, 1):
        assert save(kept.opened(KEY), number, LARGE)
    name = name_of(identity(0), KEY)
    kept.write(name, PLANTED[plant](kept, kept.read(name)))
    tier = kept.opened(KEY)
    assert load(tier, 0, LARGE) is None
    assert counts(tier) == (0, 1, 1, 0)
    assert save(tier, 0, LARGE)  # the tower ran again
    assert load(tier, 0, LARGE) == features(0, LARGE)
    assert load(tier, 1, LARGE) == features(1, LARGE)


@pytest.mark.process
def test_what_is_encrypted_is_no_package_without_a_key(kept: Kept) -> None:
    """Should it lie under the name that it has without one."""
    assert save(kept.opened(KEY), 0)
    kept.opened(PLAIN)
    entry = kept.read(name_of(identity(0), KEY))
    assert save(kept.opened(PLAIN), 1)
    kept.write(identity(0).key, entry)
    tier = kept.opened(PLAIN)
    assert load(tier, 0) is None
    assert counts(tier) == (0, 1, 1, 0)


@pytest.fixture(params=["disk", "remote"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[PlainCodec], Place]:
    if request.param == "disk":
        return lambda key: DiskPlace(tmp_path, 1 << 22, rest_s=0.0, codec=key)
    server: Server = request.getfixturevalue("server")
    return lambda key: RemotePlace(server.url, ttl_s=100, timeout_s=TIMEOUT_S, codec=key)


def value_of(entry: Entry | None) -> bytes | None:
    return entry and entry.value


@pytest.mark.parametrize("value", [b"", b"a value that nobody reads", b"v" * MAX_VALUE_BYTES])
def test_records(places: Callable[[PlainCodec], Place], tmp_path: Path, server: Server, value: bytes) -> None:
    place = places(KEY)
    place.save({RECORD: value})
    again = places(KEY)
    assert value_of(again.get(RECORD)) == value
    for key in (PLAIN, OTHER):
        other = places(key)
        assert other.get(RECORD) is None
        assert other.counts.snapshot()["corrupt"] == 0
        other.close()
    place.close()
    again.close()
    lies = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    lies += b"".join(name + (server.client.get(name) or b"") for name in server.client.keys("*"))
    assert len(lies) > len(value)
    assert RECORD not in lies
    assert RECORD.hex().encode() not in lies
    assert not value or value[:20] not in lies


def test_records_that_were_moved_or_changed(tmp_path: Path, server: Server) -> None:
    keys = [records.key("test", name) for name in "ab"]
    names = [KEY.name(key) for key in keys]
    disk, there = (
        DiskPlace(tmp_path, 1 << 22, codec=KEY),
        RemotePlace(server.url, ttl_s=100, timeout_s=TIMEOUT_S, codec=KEY),
    )
    for place in (disk, there):
        place.save({keys[0]: b"value", keys[1]: b"other"})
    for planted in (KEY.encrypt(names[1], b"x"), OTHER.encrypt(names[0], b"x"), b"x", PLAIN.encrypt(names[0], b"x")):
        (file,) = (tmp_path / "records").glob("*.sqlite")
        with sqlite3.connect(file) as connection:
            connection.execute("UPDATE records SET frame = ? WHERE key = ?", (planted, names[0]))
        connection.close()
        server.client.set(RECORDS + names[0].hex(), planted)
        for place in (disk, there):
            before = place.counts.snapshot()["corrupt"]
            assert place.get(keys[0]) is None
            assert place.counts.snapshot()["corrupt"] == before + 1
            assert value_of(place.get(keys[1])) == b"other"
    disk.close()


def key_file(folder: Path, secret: bytes) -> str:
    path = folder / secret[:1].decode()
    path.write_text(secret.hex())
    path.chmod(0o600)
    return str(path)


def test_the_setting_reaches_all(tmp_path: Path, server: Server) -> None:
    store = f"{tmp_path / 'store'} {server.url}"
    chosen = load_settings(
        {"store": store, "store_key_file": key_file(tmp_path, b"k" * 32), "store_remote_timeout_s": TIMEOUT_S}
    )
    for tier in open_tiers(chosen):
        assert save(tier, 0)
        assert name_of(identity(0), tier._codec) == name_of(identity(0), KEY)
    kept = Records.of(chosen)
    kept.put(RECORD, b"value")
    assert kept.flush(LONG_S)
    assert kept.close()
    names = server.client.keys("*")
    assert sorted(names) == sorted(
        [f"{PREFIX}{name_of(identity(0), KEY)}".encode(), f"{RECORDS}{KEY.name(RECORD).hex()}".encode()]
    )


def test_a_key_that_goes_away_puts_nothing_in_the_clear(tmp_path: Path) -> None:
    """As on another machine, which has the settings and not the file."""
    place = key_file(tmp_path, b"k" * 32)
    chosen = load_settings({"store": str(tmp_path / "store"), "store_key_file": place})
    os.unlink(place)
    with pytest.raises(Exception, match="store_key_file"):
        open_tiers(chosen)
    kept = Records.of(chosen)
    assert kept.counts().keys() == {"ram"}
    kept.put(RECORD, b"value")
    assert kept.get(RECORD) == b"value"
    assert not (tmp_path / "store").exists()


def test_the_commands_know_the_key_and_leave_what_is_of_another(tmp_path: Path, server: Server) -> None:
    mine: dict[str, Any] = {
        "MMCACHE_STORE": f"{tmp_path / 'store'} {server.url}",
        "MMCACHE_STORE_KEY_FILE": key_file(tmp_path, b"k" * 32),
    }
    for key in (KEY, OTHER):
        tiers = (
            DiskTier(tmp_path / "store", BUDGET_BYTES, codec=key),
            RemoteTier(server.url, ttl_s=100, max_bytes=BUDGET_BYTES, timeout_s=TIMEOUT_S, codec=key),
        )
        places = (
            DiskPlace(tmp_path / "store", 1 << 22, codec=key),
            RemotePlace(server.url, ttl_s=100, timeout_s=TIMEOUT_S, codec=key),
        )
        for tier in tiers:
            assert save(tier, 0)
        for place in places:
            place.save({RECORD: b"value"})
            place.close()
    listed = json.loads(mmcache("store", "ls", "--json", **mine).stdout)
    assert sorted(line["content_id"][:13] for line in listed["packages"]) == ["? (encrypted ", "image-0"]
    checked = mmcache("store", "check", "--json", **mine)
    assert checked.returncode == 0, checked.stderr
    said = json.loads(checked.stdout)
    assert said == {
        "good": 1,
        "set_aside": [],
        "records": {"good": 1, "removed": 0},
        "remote": {"good": 2, "removed": 0},
    }
    without = mmcache("store", "check", "--json", MMCACHE_STORE=mine["MMCACHE_STORE"])
    assert (without.returncode, json.loads(without.stdout)["good"]) == (0, 0)
    assert server.client.dbsize() == 4
    assert "MMCACHE_STORE_KEY_FILE" in mmcache("store", "ls", MMCACHE_STORE=mine["MMCACHE_STORE"]).stdout
    path = DiskTier(tmp_path / "store", BUDGET_BYTES).directory.path_of(name_of(identity(0), KEY))
    path.write_bytes(path.read_bytes()[:-1])
    server.client.set(PREFIX + name_of(identity(0), KEY), packed(0))
    found = mmcache("store", "check", "--json", **mine)
    assert found.returncode == 1
    assert json.loads(found.stdout)["remote"] == {"good": 1, "removed": 1}
    assert json.loads(found.stdout)["set_aside"][0]["key"] == name_of(identity(0), KEY)
    assert mmcache("store", "clear", **mine).returncode == 0  # of every key
    assert server.client.dbsize() == 0
    assert not (tmp_path / "store").exists()
