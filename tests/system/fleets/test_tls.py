# SPDX-License-Identifier: Apache-2.0
"""TLS with a certificate authority of one's own. The server is a real one behind a proxy that takes TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.packages import LARGE, features, load, save
from tests.support.store_server import Server
from tests.support.valkeys import Authority, behind_tls
from tests.system.cli.test_commands import assert_one_line, mmcache
from tests.system.fleets.test_cluster import KEYS, records_at, tier_at
from vllm_mmcache.base.errors import SettingsError


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture
def port(server: Server, authority: Authority) -> Iterator[int]:
    with behind_tls(server, *authority.issued("127.0.0.1")) as port:
        yield port


def test_a_private_authority(server: Server, port: int, authority: Authority) -> None:
    server.client.config_set("requirepass", "secret")
    try:
        url = f"rediss://:secret@127.0.0.1:{port}?ssl_ca_certs={authority.certificate}"
        tier, records = tier_at(url), records_at(url)
        assert save(tier, 0, LARGE)
        assert load(tier, 0, LARGE) == features(0, LARGE)
        records.put_many({KEYS[0]: b"value"})
        assert records.get(KEYS[0], bytes) is not None
        assert "2 entries are good" in mmcache("store", "check", MMCACHE_STORE=url).stdout
    finally:
        server.client.execute_command("AUTH", "secret")
        server.client.config_set("requirepass", "")
        server.client.connection_pool.disconnect()


def refused(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """The one line of each kind about it, where nothing is loaded and nothing saved."""
    caplog.clear()
    tier = tier_at(url)
    assert load(tier, 0) is None
    assert not save(tier, 0)
    reading, writing = caplog.messages
    assert "(reading) is off" in reading
    assert "(writing) is off" in writing
    return reading


def test_another_authority_is_refused(
    port: int, server: Server, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority(tmp_path / "other", "other")
    for url in (f"rediss://127.0.0.1:{port}?ssl_ca_certs={other.certificate}", f"rediss://127.0.0.1:{port}"):
        assert "certificate verify failed" in refused(url, caplog).lower()
    assert server.client.dbsize() == 0
    line = mmcache("store", "ls", MMCACHE_STORE=url)
    assert_one_line(line, "certificate verify failed")


def test_another_host_is_refused(server: Server, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    with behind_tls(server, *authority.issued("cache.example")) as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.certificate}"
        assert "IP address mismatch" in refused(url, caplog)
        assert server.client.dbsize() == 0
        tier = tier_at(f"{url}&ssl_check_hostname=false")  # said so by the operator; doctor calls it no TLS
        assert save(tier, 0)


def test_no_tls_there_is_refused(server: Server, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    refused(f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={authority.certificate}&socket_timeout=0.5", caplog)


def test_a_file_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"ssl_ca_certs = '.*none.pem' can't be read"):
        tier_at(f"rediss://127.0.0.1:1?ssl_ca_certs={tmp_path / 'none.pem'}")
