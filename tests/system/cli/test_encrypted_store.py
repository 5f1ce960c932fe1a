# SPDX-License-Identifier: Apache-2.0
"""The commands over a store that is encrypted: they know its key, and leave what is another key's."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.packages import file_tier, identity, packed, redis_tier, save
from tests.support.redis_faults import remote_tier
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import record_tier
from tests.system.cli.test_commands import mmcache
from vllm_mmcache.components.features.tiers import FEATURES, key_of
from vllm_mmcache.storage.encryption import AesGcmCodec
from vllm_mmcache.storage.frame import key
from vllm_mmcache.storage.record_store import RECORDS

pytestmark = pytest.mark.process

KEY, OTHER = AesGcmCodec(b"k" * 32), AesGcmCodec(b"o" * 32)
RECORD = key("test", "a")
NAME = KEY.name(key_of(identity(0)))


@pytest.fixture
def without_key(tmp_path: Path, server: Server) -> dict[str, Any]:
    """The settings of a store in which both keys have the same package and the same record, in each place."""
    place = tmp_path / "store"
    for codec in (KEY, OTHER):
        assert save(file_tier(place, codec=codec), 0)
        assert save(redis_tier(server.url, codec=codec), 0)
        records = remote_tier(server.url, RECORDS, TIMEOUT_S)
        records.codec = codec
        for tier in (record_tier(place, codec=codec), records):
            tier.put_many({RECORD: b"value"})
            tier.close()
    assert server.client.dbsize() == 4
    return {"MMCACHE_STORE": f"{place} {server.url}"}


@pytest.fixture
def with_key(tmp_path: Path, without_key: dict[str, Any]) -> dict[str, Any]:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text((b"k" * 32).hex())
    return {**without_key, "MMCACHE_STORE_KEY_FILE": str(path)}


def test_what_is_another_keys_is_listed_and_left_alone(with_key: dict[str, Any], server: Server) -> None:
    listed = json.loads(mmcache("store", "ls", "--json", **with_key).stdout)
    assert sorted(line["content_id"][:13] for line in listed["packages"]) == ["? (encrypted ", "image-0"]
    checked = mmcache("store", "check", "--json", **with_key)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout) == {
        "good": 1,
        "set_aside": [],
        "records": {"good": 1, "removed": 0},
        "remote": {"good": 2, "removed": 0},
    }
    assert server.client.dbsize() == 4


def test_without_the_key(without_key: dict[str, Any], server: Server) -> None:
    checked = mmcache("store", "check", "--json", **without_key)
    assert (checked.returncode, json.loads(checked.stdout)["good"]) == (0, 0)
    assert "MMCACHE_STORE_KEY_FILE" in mmcache("store", "ls", **without_key).stdout
    assert server.client.dbsize() == 4


def test_what_is_damaged_is_taken_out_and_all_is_cleared(
    with_key: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    (path,) = (tmp_path / "store").rglob(f"{NAME.hex()}*")
    path.write_bytes(path.read_bytes()[:-1])
    server.client.set(FEATURES.remote_prefix + NAME.hex(), packed(0))
    found = mmcache("store", "check", "--json", **with_key)
    assert found.returncode == 1
    said = json.loads(found.stdout)
    assert said["remote"] == {"good": 1, "removed": 1}
    assert said["set_aside"][0]["key"] == NAME.hex()
    assert mmcache("store", "clear", **with_key).returncode == 0  # of every key
    assert server.client.dbsize() == 0
    assert not (tmp_path / "store").exists()
