# SPDX-License-Identifier: Apache-2.0
"""Where a request's tenant is found, and what can't name one. tests/system/identity has the servers."""

import itertools
from pathlib import Path

import pytest

from vllm_mmcache.base import settings, tenant
from vllm_mmcache.base.errors import SettingsError, TenantError
from vllm_mmcache.base.tenant import MAX_NAME_BYTES, Headers, TenantSource, parse_source
from vllm_mmcache.content.content_name import name_of
from vllm_mmcache.content.tenant_source import configured_source

HEADER = parse_source("header:X-Tenant")
API_KEY = parse_source("api_key")


@pytest.mark.parametrize(
    ("given", "headers", "name"),
    [
        (HEADER, [], None),
        (HEADER, [(b"x-other", b"a")], None),
        (HEADER, [(b"x-tenant", b"a")], b"a"),
        (HEADER, [(b"x-tenant", b"  a \t")], b"a"),
        (HEADER, [(b"x-tenant", b"CN=a, O=b")], b"CN=a, O=b"),
        (HEADER, [(b"x-tenant", b"\xff\xfe")], b"\xff\xfe"),
        (HEADER, [(b"x-tenant", b"a" * MAX_NAME_BYTES)], b"a" * MAX_NAME_BYTES),
        (HEADER, [(b"authorization", b"Bearer a")], None),
        (API_KEY, [], None),
        (API_KEY, [(b"authorization", b"Bearer a")], b"a"),
        (API_KEY, [(b"authorization", b"bearer  a ")], b"a"),
        (API_KEY, [(b"authorization", b"Basic a")], None),
        (API_KEY, [(b"x-api-key", b"a")], b"a"),
        (API_KEY, [(b"x-api-key", b"a"), (b"authorization", b"Bearer a")], b"a"),
        (API_KEY, [(b"x-tenant", b"a")], None),
    ],
)
def test_names(given: TenantSource, headers: Headers, name: bytes | None) -> None:
    assert given.salt_in(headers) == (None if name is None else given.salt_of(name))


@pytest.mark.parametrize(
    ("given", "headers", "said"),
    [
        (HEADER, [(b"x-tenant", b"")], "'x-tenant' is empty"),
        (HEADER, [(b"x-tenant", b" \t ")], "'x-tenant' is empty"),
        (HEADER, [(b"x-tenant", b"secret"), (b"x-tenant", b"other")], "'x-tenant' was sent 2 times"),
        (HEADER, [(b"x-tenant", b"secret")] * 3, "'x-tenant' was sent 3 times"),
        (HEADER, [(b"x-tenant", b"s" * 2**20)], "'x-tenant' has 1048576 bytes"),
        (API_KEY, [(b"authorization", b"Bearer ")], "'authorization' is empty"),
        (API_KEY, [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer x")], "sent 2 times"),
        (API_KEY, [(b"authorization", b"Bearer secret"), (b"x-api-key", b"other")], "two API keys"),
        (API_KEY, [(b"x-api-key", b"")], "'x-api-key' is empty"),
    ],
)
def test_what_names_no_tenant(given: TenantSource, headers: Headers, said: str) -> None:
    with pytest.raises(TenantError, match=said) as raised:
        given.salt_in(headers)
    assert "secret" not in str(raised.value)
    assert len(str(raised.value)) < 200


def test_salts_are_apart_by_name_kind_header_and_key() -> None:
    """Also of names that would be equal if they were joined without a border."""
    sources = [HEADER, parse_source("header:X-Team"), API_KEY, parse_source("header:X-Tenant", b"k" * 32)]
    salts = [one.salt_of(name) for one, name in itertools.product(sources, ["a", "b", "", "\0a", "é"])]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 64 for salt in salts)
    assert HEADER.salt_of("é") == HEADER.salt_of("é".encode())
    assert parse_source("header:x-TENANT") == HEADER
    assert HEADER.salt_of(" a\n") == HEADER.salt_of("a")
    assert TenantSource().salt_of("a") == "a"


def test_a_header_is_hidden_by_the_digest() -> None:
    """A salt goes into the names of images, keys of KV blocks and connectors: no tenant can be read from it."""
    assert "acme" not in HEADER.salt_of("acme")
    assert "61636d65" not in HEADER.salt_of("acme")


@pytest.mark.parametrize(
    "text",
    ["", "header", "header:", "header:a b", "header:ä", "salt", "header:" + "a" * 65, "header:X\r\nY", "Api_Key"],
)
def test_wrong_settings(text: str) -> None:
    with pytest.raises(ValueError, match="header:X-Tenant"):
        parse_source(text)


@pytest.mark.parametrize("name", ["Authorization", "host", "Content-Length"])
def test_headers_that_can_name_no_tenant(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} can't name a tenant"):
        parse_source(f"header:{name}")


def test_a_body_may_repeat_its_tenant_and_name_no_other() -> None:
    token = tenant.SALT.set(HEADER.salt_of("a"))
    try:
        HEADER.check_body(None)
        HEADER.check_body("a")
        for other in ("b", "", HEADER.salt_of("a"), 7, ["a"], {"a": "a"}, "\ud800", True):
            with pytest.raises(TenantError, match="Leave 'cache_salt' out"):
                HEADER.check_body(other)
    finally:
        tenant.SALT.reset(token)
    with pytest.raises(TenantError, match="Header 'x-tenant' does that here"):
        HEADER.check_body("a")  # where no header names one, the body can't either
    TenantSource().check_body("anything")


def write_key(path: Path, mode: int = 0o600) -> str:
    path.write_text("5e" * 32)
    path.chmod(mode)
    return str(path)


def test_the_key_of_the_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv("MMCACHE_TENANT_FROM", "header:X-Tenant")
    assert configured_source() == HEADER
    monkeypatch.setenv("MMCACHE_TENANT_KEY_FILE", write_key(tmp_path / "key"))
    monkeypatch.setattr(settings, "_current", None)
    assert configured_source() == parse_source("header:X-Tenant", bytes.fromhex("5e" * 32))
    assert configured_source().salt_of("a") != HEADER.salt_of("a")


@pytest.mark.parametrize(("mode", "said"), [(0o644, "others may read"), (0o620, "others may read or change it")])
def test_a_key_file_that_others_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, said: str) -> None:
    monkeypatch.setenv("MMCACHE_TENANT_KEY_FILE", write_key(tmp_path / "key", mode))
    with pytest.raises(SettingsError, match=said) as raised:
        settings.load_settings()
    assert "tenant_key_file" in str(raised.value)
    assert "5e5e" not in str(raised.value)


@pytest.mark.parametrize("other", ["MMCACHE_DISABLE=1", "MMCACHE_IDENTITY=0"])
@pytest.mark.parametrize("one", ["MMCACHE_TENANT_FROM=api_key", "MMCACHE_REQUIRE_TENANT=1", "MMCACHE_REQUIRE_SALT=1"])
def test_contradictions(monkeypatch: pytest.MonkeyPatch, one: str, other: str) -> None:
    """What promises tenants apart does not start with what would leave them together."""
    for variable, _, value in (one.partition("="), other.partition("=")):
        monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match="contradict each other: nothing would keep tenants apart") as raised:
        settings.load_settings()
    assert one.partition("=")[0] in str(raised.value)
    assert other.partition("=")[0] in str(raised.value)


def test_a_wrong_source_is_refused_with_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCACHE_TENANT_FROM", "header")
    with pytest.raises(SettingsError, match=r"MMCACHE_TENANT_FROM = 'header' is not allowed.*header:X-Tenant"):
        settings.load_settings()


def test_vectors() -> None:
    """As docs/identity.md says them; another value is another tenant on every store and every replica."""
    salts = {
        parse_source("header:X-Tenant").salt_of("acme"),
        parse_source("header:x-tenant", bytes(range(32))).salt_of("acme"),
        parse_source("api_key").salt_of("sk-0"),
    }
    assert salts == {
        "86273311506412b3aed4c7ec0b128acc108648a82c9140124ff4e3322d570786",
        "4787417dac7e3eee98ec8bdba2083999e165b3cec3052fcdfd8309fa99c42b55",
        "c172941ef6580907a88e2e45a1b12bd6484dafbb1bcfed38d232a8908f35272b",
    }
    assert name_of(b"a picture") == "mmc2-6689f07d83fb9e1146581eff5167c0e530805d1340d74ba9586eda69ed083d57"
