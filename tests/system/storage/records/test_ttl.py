# SPDX-License-Identifier: Apache-2.0
"""Records that nobody uses go from the file, also under a server that only runs; in Valkey they expire."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_mmcache.storage.records import RENEW_S, Records
from vllm_mmcache.storage.records import writer as writer_module
from vllm_mmcache.storage.records.disk import DiskPlace
from vllm_mmcache.storage.records.remote import RemotePlace

from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S, within
from tests.system.storage.records.test_disk import KEYS, change, file_of, value_of
from tests.system.storage.records.test_remote import KEY as KEY_THERE
from tests.system.storage.records.test_remote import NAME
from vllm_mmcache.base import settings
from vllm_mmcache.storage import records

TTL_S = 100_000


def place_at(folder: Path, ttl_s: int = TTL_S) -> DiskPlace:
    return DiskPlace(folder, 1 << 20, ttl_s=ttl_s, rest_s=0.0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[DiskPlace]:
    opened = place_at(tmp_path)
    yield opened
    opened.close()


def age(place: DiskPlace, key: bytes, seconds: float = 1.5 * TTL_S) -> None:
    change(place, "UPDATE records SET written_s = ? WHERE key = ?", int(time.time() - seconds), key)


@pytest.mark.parametrize("ttl_s", [TTL_S, 0])
def test_what_was_not_used_goes_and_what_was_stays(tmp_path: Path, ttl_s: int) -> None:
    place = place_at(tmp_path, ttl_s)
    place.save(dict.fromkeys(KEYS, b"value"))
    for key in KEYS[:3]:
        age(place, key)
    age(place, KEYS[3], TTL_S / 2)
    place.save({KEYS[0]: b"again"})
    assert place.sweep()[1] == (2 if ttl_s else 0)
    gone = [key for key in KEYS if place.get(key) is None]
    assert gone == (KEYS[1:3] if ttl_s else [])
    place.close()


def test_a_file_that_was_set_aside_goes_too(place: DiskPlace) -> None:
    place.save({KEYS[0]: b"value"})
    place.close()
    damaged = file_of(place)
    damaged.write_bytes(b"no database" * 1000)
    place.save({KEYS[0]: b"value"})
    place.sweep()
    assert damaged.exists()  # for a look
    then = time.time() - 1.5 * TTL_S
    for path in place.folder.glob(damaged.name + "*"):
        os.utime(path, (then, then))
    os.utime(file_of(place), (then, then))  # the one in use never goes
    place.sweep()
    assert not damaged.exists()
    assert value_of(place.get(KEYS[0])) == b"value"


def test_a_process_that_uses_records_removes_them_and_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_at(tmp_path)
    place.save(dict.fromkeys(KEYS[:2], b"value"))
    age(place, KEYS[0])
    monkeypatch.setattr(writer_module, "TIDY_S", 0.05)
    kept = Records(1 << 20, [place_at(tmp_path)])
    assert within(LONG_S, lambda: place.get(KEYS[0]) is None)
    assert value_of(place.get(KEYS[1])) == b"value"
    age(place, KEYS[1])
    assert within(LONG_S, lambda: place.get(KEYS[1]) is None)
    assert kept.close(LONG_S)
    place.close()


def test_a_place_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    place = place_at(tmp_path / "store")
    place.tidy()
    assert not (tmp_path / "store").exists()
    assert place.counts.snapshot()["errors"] == 0


@pytest.mark.parametrize(("ttl_s", "renew_s"), [(0, RENEW_S), (10 * 86400, RENEW_S), (1000, 500)])
def test_what_is_used_is_written_again_before_it_expires(tmp_path: Path, ttl_s: int, renew_s: float) -> None:
    assert Records(1 << 20, [place_at(tmp_path, ttl_s)]).renew_s == renew_s
    assert Records(1 << 20).renew_s == RENEW_S


@pytest.mark.parametrize("ttl_s", [TTL_S, 0])
def test_valkey(server: Server, ttl_s: int) -> None:
    place = RemotePlace(server.url, ttl_s=ttl_s, timeout_s=TIMEOUT_S)
    place.save({KEY_THERE: b"value"})
    ttl = server.client.ttl(NAME)
    assert TTL_S - 100 < ttl <= TTL_S if ttl_s else ttl == -1


def test_the_setting_reaches_both_places(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings.load_settings({"store": f"{tmp_path} {server.url}", "store_ttl": "2h"})
    monkeypatch.setattr(settings, "_current", chosen)
    assert [place.ttl_s for place in records.current()._below] == [7200, 7200]
    assert records.current().renew_s == RENEW_S
