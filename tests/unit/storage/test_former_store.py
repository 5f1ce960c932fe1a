# SPDX-License-Identifier: Apache-2.0
"""A store that an earlier version has written is read, and what is written now is what that version wrote.

So a server can be updated and put back without losing its store. data/earlier_store/README.md says what lies there.
"""

import itertools
import json
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from vllm_mmcache.base.settings import Settings
from vllm_mmcache.components.features import tiers
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage import encryption, frame
from vllm_mmcache.storage.open import open_tiers
from vllm_mmcache.storage.record_store import RECORDS, RecordStore
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.tier import Tier

DATA = Path(__file__).parent / "data" / "earlier_store"
MANIFEST: dict[str, Any] = json.loads((DATA / "manifest.json").read_text())
STORES = ("plain", "encrypted")
PRAGMAS = ("user_version", "auto_vacuum", "page_size", "encoding", "application_id")


def settings_of(store: str, place: Path, key_folder: Path) -> Settings:
    key_file = key_folder / MANIFEST["key_file"]
    shutil.copyfile(DATA / MANIFEST["key_file"], key_file)
    key_file.chmod(0o600)
    return Settings(store=str(place), store_key_file=str(key_file) if store == "encrypted" else None)


def laid(store: str, folder: Path) -> Path:
    """A copy of the store with the modes that it had, which Git does not keep."""
    shutil.copytree(DATA / store, folder / store)
    for name, mode in MANIFEST[store]["modes"].items():
        (folder / name).chmod(int(mode, 8))
    return folder / store


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(store: str, tmp_path: Path) -> Iterator[Callable[[Path], tuple[Tier, Tier]]]:
    """Opens the tiers of packages and records at a place, as the settings say."""
    made: list[Tier] = []

    def open_at(place: Path) -> tuple[Tier, Tier]:
        chosen = settings_of(store, place, tmp_path)
        (packages,), (records,) = open_tiers(chosen, FEATURES), open_tiers(chosen, RECORDS)
        made.extend([packages, records])
        return packages, records

    yield open_at
    for tier in made:
        tier.close()


def facts_of(package: dict[str, Any]) -> tuple[Identity, Shape, bytes]:
    num_tokens, width = package["shape"]
    shape = Shape(num_tokens, width, package["dtype"])
    return Identity.from_json(package["identity"]), shape, bytes.fromhex(package["features_hex"])


def find(tier: Tier, package: dict[str, Any]) -> bytes | None:
    identity, shape, _ = facts_of(package)
    room = bytearray(b"\xa5" * shape.num_bytes)
    filled = tiers.load(tier, identity, shape, lambda: memoryview(room), time.monotonic() + 60)
    return bytes(room) if filled else None


def key_of(record: dict[str, Any]) -> bytes:
    fields = [field["text"] if "text" in field else bytes.fromhex(field["hex"]) for field in record["fields"]]
    return frame.key(record["kind"], *fields)


def database_of(place: Path) -> tuple[dict[str, object], list[list[object]], dict[str, str]]:
    """Pragmas, schema, and the rows by key."""
    (file,) = (place / "records").glob("*.sqlite")
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        pragmas = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in PRAGMAS}
        schema = [list(row) for row in connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")]
        rows = {key.hex(): entry.hex() for key, entry in connection.execute("SELECT key, frame FROM records")}
    return pragmas, schema, rows


def written(place: Path, store: str, opened: Callable[[Path], tuple[Tier, Tier]]) -> None:
    """Write anew what the earlier version wrote."""
    packages, records = opened(place)
    for package in MANIFEST[store]["packages"]:
        identity, shape, features = facts_of(package)
        assert tiers.save(packages, identity, shape, memoryview(features))
    kept = RecordStore(1 << 20, [records])
    for record in MANIFEST[store]["records"]:
        kept.put(key_of(record), bytes.fromhex(record["value_hex"]))
    assert kept.close(60)


def test_everything_is_read(store: str, tmp_path: Path, opened: Callable[[Path], tuple[Tier, Tier]]) -> None:
    packages, records = opened(laid(store, tmp_path))
    for package in MANIFEST[store]["packages"]:
        assert facts_of(package)[0].key == package["key"]
        assert find(packages, package) == bytes.fromhex(package["features_hex"])
    for record in MANIFEST[store]["records"]:
        assert key_of(record).hex() == record["key"]
        hit = records.get(key_of(record), bytes)
        assert hit is not None
        assert hit[1].hex() == record["value_hex"]
        assert hit[0].written_s == record["written_s"]
    for tier, num_entries in ((packages, 4), (records, 12)):
        counts = tier.counts.snapshot()
        assert (counts["hits"], counts["misses"], counts["errors"]) == (num_entries, 0, 0)
        assert len(list(tier.backend.scan())) == tier.backend.sizes()[0] == num_entries
        assert tier.backend.verify() is None
    assert packages.check(lambda name, content: tiers.check(name, content, packages.codec)) == (4, [])
    assert records.check(frame.check) == (12, [])


def test_it_goes_on_in_the_same_files(store: str, tmp_path: Path, opened: Callable[[Path], tuple[Tier, Tier]]) -> None:
    """What is there is not written again, and what is new comes beside it; the account goes on."""
    place = laid(store, tmp_path)
    before = {path: path.read_bytes() for path in place.rglob("*.safetensors")}
    assert (place / "features" / "lock").read_bytes().hex() == MANIFEST[store]["lock_hex"]
    written(place, store, opened)
    packages, records = opened(place)
    assert {path: path.read_bytes() for path in place.rglob("*.safetensors")} == before
    shape = Shape(3, 4, "float32")
    assert tiers.save(packages, Identity("another", "", "", "float32", ""), shape, memoryview(bytes(48)))
    held = sum(path.stat().st_size for path in place.rglob("*.safetensors"))
    assert int((place / "features" / "lock").read_text()) == held
    records.put_many({bytes(32): b"another"})
    assert [path.name for path in (place / "records").glob("*.sqlite")] == [
        Path(MANIFEST[store]["database"]["file"]).name
    ]
    assert records.backend.sizes()[0] == 13


def test_what_is_written_now_is_what_was_written(
    store: str, tmp_path: Path, opened: Callable[[Path], tuple[Tier, Tier]]
) -> None:
    """Byte for byte, where nothing is encrypted; names, lengths and layout in any case."""
    place = tmp_path / store
    written(place, store, opened)
    manifest = MANIFEST[store]
    packages = {package["file"]: package for package in manifest["packages"]}
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in place.rglob("*.safetensors")}
    assert files.keys() == packages.keys()
    for name, entry in files.items():
        assert len(entry) == packages[name]["entry_bytes"]
        if store == "plain":
            assert entry.hex() == packages[name]["entry_hex"]
            assert entry == (DATA / name).read_bytes()
    assert (place / "features" / "lock").read_bytes().hex() == manifest["lock_hex"]
    pragmas, schema, rows = database_of(place)
    assert pragmas == {name: manifest["database"]["pragmas"][name] for name in PRAGMAS}
    assert schema == manifest["database"]["schema"]
    records = {record["name"]: record for record in manifest["records"]}
    assert rows.keys() == records.keys()
    for name, entry_hex in rows.items():
        assert len(entry_hex) == len(records[name]["entry_hex"])
        if store == "plain":
            assert entry_hex == records[name]["entry_hex"]

    def modes(of: dict[str, int]) -> dict[str, str]:
        return {name.replace("-journal", "").split("-0000")[0]: f"{mode:04o}" for name, mode in of.items()}

    now = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o7777 for path in (place, *place.rglob("*"))}
    assert modes(now) == modes({name: int(mode, 8) for name, mode in manifest["modes"].items()})


def test_what_is_encrypted_now_is_read_by_its_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one, two and three chunks: with the same nonces the same bytes."""
    chosen = settings_of("encrypted", tmp_path, tmp_path)
    codec = encryption.of(chosen.store_key_file)
    for large in MANIFEST["encrypted_large"]:
        counted = itertools.count()
        monkeypatch.setattr(os, "urandom", lambda n, counted=counted: next(counted).to_bytes(n, "little"))
        content = random.Random(large["seed"]).randbytes(large["num_bytes"])
        entry = codec.encrypt_bytes(bytes.fromhex(large["name"]), content)
        assert len(entry) == large["entry_bytes"]
        assert blake3(entry).hexdigest() == large["entry_blake3"]
        assert codec.decrypt_bytes(bytes.fromhex(large["name"]), entry) == content


def test_names_in_redis(store: str, tmp_path: Path) -> None:
    codec = encryption.of(settings_of(store, tmp_path, tmp_path).store_key_file)
    for kind, entries in ((FEATURES, "packages"), (RECORDS, "records")):
        backend = RedisBackend("redis://127.0.0.1:1", kind, ttl_s=0, timeout_s=1, max_bytes=1)
        for entry in MANIFEST[store][entries]:
            assert backend.name_of(codec.name(bytes.fromhex(entry["key"]))) == entry["redis_name"]
