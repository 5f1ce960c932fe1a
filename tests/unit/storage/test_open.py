# SPDX-License-Identifier: Apache-2.0
"""Which tiers the settings ask for, of each kind, and that nothing is put in the clear where a key is missing."""

import os
from pathlib import Path

import pytest

from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.settings import Settings, load_settings
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.encryption import PLAIN, AesGcmCodec
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.open import open_tiers, tiers_at
from vllm_mmcache.storage.record_store import RECORDS, RecordStore, key
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.sqlite import SqliteBackend

KINDS = pytest.mark.parametrize("kind", [FEATURES, RECORDS], ids=["features", "records"])
URL = "redis://localhost:1"
SECRET = b"k" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(SECRET.hex())
    return str(path)


@KINDS
def test_nearest_first(kind: Kind, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert open_tiers(load_settings(), kind) == []
    for asked, names in ((store, ["disk"]), (URL, ["remote"]), (f"{URL} {store}", ["disk", "remote"])):
        opened = open_tiers(load_settings({"store": asked}), kind)
        assert [tier.name for tier in opened] == names
        assert [tier.kind for tier in opened] == [kind] * len(names)
    disk, remote = (tier.backend for tier in opened)
    assert isinstance(disk, SqliteBackend if kind.is_small else FileBackend)
    assert isinstance(remote, RedisBackend)
    assert not os.path.exists(store), "nothing is made before it is used"


@KINDS
def test_what_the_settings_say_reaches_all(kind: Kind, tmp_path: Path, key_file: str) -> None:
    asked = {"store": f"{tmp_path} {URL}", "store_ttl": "2h", "store_remote_max_bytes": "1MB", kind.disk_budget: "8MB"}
    disk, remote = plain = open_tiers(load_settings(asked), kind)
    assert [tier.ttl_s for tier in plain] == [7200, 7200]
    assert [tier.codec for tier in plain] == [PLAIN, PLAIN]
    assert (disk.backend.budget_bytes, remote.max_bytes) == (8 * 1000**2, 1000**2)
    name = AesGcmCodec(SECRET).name(key("a"))
    encrypted = open_tiers(load_settings({**asked, "store_key_file": key_file}), kind)
    assert [tier.codec.name(key("a")) for tier in encrypted] == [name, name]


@KINDS
def test_a_budget_of_nothing_is_no_tier(kind: Kind, tmp_path: Path) -> None:
    chosen = Settings(**{"store": f"{tmp_path} {URL}", kind.disk_budget: 0})
    assert [tier.name for tier in open_tiers(chosen, kind)] == ["remote"]


@KINDS
def test_a_url_that_is_none(kind: Kind, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Settings refuse it; where they came from another process, it is left out or refused here."""
    chosen = Settings(store=f"{tmp_path} {URL}?bogus=1")
    with pytest.raises(SettingsError, match="bogus"):
        open_tiers(chosen, kind)
    assert [tier.name for tier in open_tiers(chosen, kind, leaves_out=True)] == ["disk"]
    assert [kind.name in line and "bogus" in line for line in log.messages] == [True]


@KINDS
def test_a_key_that_went_away(kind: Kind, tmp_path: Path, key_file: str, log: pytest.LogCaptureFixture) -> None:
    """As on another machine, which has the settings and not the file: nothing is put in the clear."""
    store = tmp_path / "store"
    chosen = load_settings({"store": f"{store} {URL}", "store_key_file": key_file})
    os.unlink(key_file)
    with pytest.raises(SettingsError, match="store_key_file"):
        open_tiers(chosen, kind)
    assert open_tiers(chosen, kind, leaves_out=True) == []
    assert [f"{kind.name} in RAM alone" in line for line in log.messages] == [True]
    records = RecordStore.of(chosen)
    assert records.counts().keys() == {"ram"}
    records.put(key("a"), b"value")
    assert records.get(key("a")) == b"value"
    assert records.close()
    assert not store.exists()


def test_the_command_line_may_wait_longer() -> None:
    (tier,) = tiers_at(None, URL, load_settings({"store_remote_timeout_s": 0.02}), FEATURES, timeout_s=3.0)
    assert isinstance(tier.backend, RedisBackend)
    assert tier.backend._nodes._options["socket_timeout"] == 3.0
