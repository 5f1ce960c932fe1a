# SPDX-License-Identifier: Apache-2.0
"""URLs of Redis and Valkey: what they say, which are refused at start, and where others may get in."""

from pathlib import Path

import pytest

from vllm_mmcache.base import settings
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.remote_url import SCHEMES, parsed
from vllm_mmcache.base.settings_messages import why_exposed
from vllm_mmcache.base.store_url import store_places


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "service", "of_first"),
    [
        ("redis://h", "one", [("h", 6379)], "", "redis://h:6379/"),
        ("valkeys://u:p@h:1/3", "one", [("h", 1)], "", "rediss://u:p@h:1/3"),
        ("redis://[::1]:7/0?socket_timeout=1", "one", [("::1", 7)], "", "redis://[::1]:7/0?socket_timeout=1"),
        ("unix:///run/redis.sock?db=1", "one", [], "", "unix:///run/redis.sock?db=1"),
        ("redis+cluster://:p@a:1,b", "cluster", [("a", 1), ("b", 6379)], "", "redis://:p@a:1/"),
        ("valkeys+cluster://a/0", "cluster", [("a", 6379)], "", "rediss://a:6379/0"),
        ("redis+sentinel://a,b:2/name", "sentinel", [("a", 26379), ("b", 2)], "name", "redis://a:26379/"),
        ("rediss+sentinel://a/name/4?ssl_ca_certs=/x", "sentinel", [("a", 26379)], "name",
         "rediss://a:26379/4?ssl_ca_certs=%2Fx"),
    ],
)  # fmt: skip
def test_what_urls_say(url: str, kind: str, hosts: list[object], service: str, of_first: str) -> None:
    found = parsed(url)
    assert (found.kind, list(found.hosts), found.service, found.of_first) == (kind, hosts, service, of_first)


@pytest.mark.parametrize(
    ("store", "places"),
    [
        ("redis+cluster://a:1,b:2,c:3", (None, "redis+cluster://a:1,b:2,c:3")),
        ("/a,redis+cluster://a:1,b:2", ("/a", "redis+cluster://a:1,b:2")),
        ("redis+sentinel://a:1,b:2/name,/a", ("/a", "redis+sentinel://a:1,b:2/name")),
        ("redis+sentinel://a:1,b:2/name /a", ("/a", "redis+sentinel://a:1,b:2/name")),
    ],
)
def test_commas_of_a_url_are_its_own(store: str, places: tuple[str | None, str | None]) -> None:
    assert store_places(settings.load_settings({"store": store}).store) == places


def with_store(store: str, monkeypatch: pytest.MonkeyPatch, **more: object) -> settings.Settings:
    """The settings with a store by its variable, which may hold a password."""
    monkeypatch.setenv("MMCACHE_STORE", store)
    return settings.load_settings(more)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("redis+sentinel://a:1", "redis+sentinel://HOST:26379/NAME"),
        ("redis+sentinel://a:1/name/x", "its database is no number"),
        ("redis+cluster://a:1/1", "a cluster has the database 0 alone"),
        ("redis+cluster://a:1?db=2", "a cluster has the database 0 alone"),
        ("redis://a,b", "is neither an absolute directory nor a URL"),
        ("redis+other://a", "is neither an absolute directory nor a URL"),
        ("redis+cluster://a:1,redis+cluster://b", "only one URL"),
        ("redis+cluster://a:1,b:port", "its port is no number"),
        ("redis://a?sentinel_password=secret", "are for redis+sentinel://"),
        ("redis://a?no_such_option=1", "no_such_option"),
        ("redis+cluster://a,b?no_such_option=1", "no_such_option"),
        ("redis+sentinel://a/name?no_such_option=1", "no_such_option"),
        ("rediss://a?ssl_no_such=1", "ssl_no_such"),
        ("redis://a?socket_timeout=soon", "socket_timeout"),
        ("rediss://user:secret@a?ssl_ca_certs=/no/such", "'/no/such' can't be read"),
        ("redis://user:123/secret@a", "a / in a password is written %2F"),
        ("redis://user:123#secret@a", "a / in a password is written %2F"),
        ("redis+sentinel://user:123/secret@a/name", "a / in a password is written %2F"),
    ],
)
def test_what_is_refused_at_start(store: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError) as error:
        with_store(store, monkeypatch)
    assert said in str(error.value)
    assert "store" in str(error.value).lower()
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


OPEN = {
    "redis://cache": "no TLS and no password",
    "redis://:p@cache": "no TLS",
    "rediss://cache": "no password",
    "rediss://:p@cache?ssl_cert_reqs=none": "no TLS",
    "rediss://:p@cache?ssl_check_hostname=false": "no TLS",
    "redis+cluster://127.0.0.1": "no TLS and no password",
    "redis://127.0.0.1.example": "no TLS and no password",
    "redis+sentinel://127.0.0.1/name": "no TLS and no password",
}
CLOSED = [
    "rediss://:p@cache",
    "rediss://cache?password=p",
    "rediss+cluster://u:p@a,b",
    "redis://localhost",
    "redis://127.1.2.3:1",
    "redis://[::1]",
    "unix:///run/redis.sock",
]


@pytest.mark.parametrize("url", OPEN)
def test_a_store_that_is_open_to_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = with_store(url, monkeypatch)
    assert f"has {OPEN[url]}, and nothing encrypts" in why_exposed(opened)
    assert ":p@" not in why_exposed(opened)
    assert not why_exposed(with_store(url, monkeypatch, store_trusted_network=True))
    assert not why_exposed(settings.Settings.model_construct(**dict(opened) | KEY))


KEY = {"store_key_file": "/key"}


@pytest.mark.parametrize("url", CLOSED)
def test_a_store_that_is_not(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not why_exposed(with_store(url, monkeypatch))
    assert not why_exposed(with_store("/a", monkeypatch))


def test_a_password_from_a_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.touch(0o600)
    file.write_text("p\n")
    more = {"store_password_file": str(file)}
    for url in ("rediss://cache", "rediss+cluster://a,b", "rediss+sentinel://a,b/name?sentinel_password=s"):
        assert "no password" in why_exposed(with_store(url, monkeypatch))
        assert not why_exposed(with_store(url, monkeypatch, **more))


def test_every_plain_scheme_is_known() -> None:
    assert SCHEMES == ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")
