# SPDX-License-Identifier: Apache-2.0
"""The tiers that settings ask for, of any kind; and what a kind says of itself."""

from pathlib import Path

import pytest

from tests.support.storage_contract import THINGS
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.settings import Settings, load_settings
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.encryption import PLAIN, AesGcmCodec
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.open import open_tiers, remote_tier
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.redis_nodes import Nodes
from vllm_mmcache.storage.sqlite import SqliteBackend

URL = "redis://127.0.0.1:1"
KINDS = pytest.mark.parametrize("kind", [FEATURES, RECORDS, THINGS], ids=lambda kind: str(kind.name))


def of(tmp_path: Path, *places: str, **values: object) -> Settings:
    return load_settings({"store": " ".join(places), **values})


@KINDS
def test_no_store_no_tiers(kind: Kind) -> None:
    assert open_tiers(load_settings(), kind) == []


@KINDS
def test_nearest_first(kind: Kind, tmp_path: Path) -> None:
    for places, expected in (
        ((URL, str(tmp_path)), ["disk", "remote"]),
        ((str(tmp_path),), ["disk"]),
        ((URL,), ["remote"]),
    ):
        tiers = open_tiers(of(tmp_path, *places), kind)
        assert [tier.name for tier in tiers] == [tier.backend.tier for tier in tiers] == expected
        assert all(tier.kind is kind and tier.codec is PLAIN for tier in tiers)
    assert not any(tmp_path.iterdir()), "nothing is made before it is used"


@pytest.mark.parametrize(
    ("kind", "backend", "setting"),
    [
        (FEATURES, FileBackend, "store_disk_bytes"),
        (RECORDS, SqliteBackend, "records_disk_bytes"),
        (THINGS, FileBackend, "store_disk_bytes"),
    ],
)
def test_what_the_settings_say_reaches_the_tiers(
    kind: Kind, backend: type, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []
    made = Nodes.__init__

    def watched(self: Nodes, url: str, timeout_s: float, said: str) -> None:
        timeouts.append(timeout_s)
        made(self, url, timeout_s, said)

    monkeypatch.setattr(Nodes, "__init__", watched)
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    key_file.chmod(0o600)
    values = {setting: "8GiB", "store_ttl": "2h", "store_remote_timeout_s": 3.0, "store_remote_max_bytes": "5MiB"}
    chosen = of(tmp_path, str(tmp_path / "store"), URL, store_key_file=str(key_file), **values)
    disk, remote = open_tiers(chosen, kind)
    assert isinstance(disk.backend, backend)
    assert isinstance(remote.backend, RedisBackend)
    assert [tier.ttl_s for tier in (disk, remote)] == [7200, 7200]
    assert isinstance(disk.codec, AesGcmCodec)
    assert disk.codec is not PLAIN is not remote.codec
    assert (disk.size().budget_bytes, remote.size().budget_bytes) == (8 * 1024**3, None)
    assert remote.max_bytes == 5 * 1024**2
    assert (disk.where, remote.where) == (kind.said.format(tmp_path / "store"), kind.said.format(URL))
    assert timeouts == [3.0, 3.0]
    timeouts.clear()
    remote_tier(URL, chosen, kind, PLAIN, 0.5)  # as the command line does
    assert timeouts[0] == 0.5
    for tier in (disk, remote):
        tier.close()


def test_a_budget_of_nothing_is_no_tier(tmp_path: Path) -> None:
    chosen = of(tmp_path, str(tmp_path), URL, records_disk_bytes=0)
    assert [tier.name for tier in open_tiers(chosen, RECORDS)] == ["remote"]
    assert [tier.name for tier in open_tiers(chosen, FEATURES)] == ["disk", "remote"]


def test_what_cannot_be_used_is_refused_or_left_out(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Settings that came from another process are not checked again: then one line in the log, and no exception."""
    bad_url = Settings(store=f"{tmp_path} redis://user:secret@localhost:1?no_such_option=1")
    with pytest.raises(SettingsError, match="no_such_option") as raised:
        open_tiers(bad_url, THINGS)
    assert "secret" not in str(raised.value)
    assert [tier.name for tier in open_tiers(bad_url, THINGS, leaves_out=True)] == ["disk"]
    assert "mmcache keeps no things there: " in log.messages[0]
    assert "secret" not in log.text
    bad_key = Settings(store=f"{tmp_path} {URL}", store_key_file=str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="can't be read"):
        open_tiers(bad_key, THINGS)
    assert open_tiers(bad_key, THINGS, leaves_out=True) == []  # rather than in the clear
    assert "mmcache keeps things in RAM alone: " in log.messages[1]
    assert len(log.messages) == 2


@KINDS
def test_a_kind_has_names_of_its_own(kind: Kind) -> None:
    """Those of the known kinds are promises to the stores that exist; no kind's pattern matches another one's names."""
    known = {"features": "mmcache:features:2:", "records": "mmcache:records:1:", "things": "mmcache:things:7:"}
    assert kind.remote_prefix == known[kind.name]
    assert kind.remote_pattern == f"mmcache:{kind.name}:*"
    assert kind.rejected in kind.counters
    assert {"hits", "misses", "saved", "errors", "dropped"} <= kind.counters.keys()
    assert getattr(load_settings(), kind.disk_budget) > 0
    assert kind.said.format("there").endswith("there")
