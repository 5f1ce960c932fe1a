# SPDX-License-Identifier: Apache-2.0
"""What a server says of where things are: only what is so, and no secret."""

from argparse import Namespace
from typing import Any

import pytest

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.durations import Duration
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.components.observe.page.endpoint import address
from vllm_mmcache.lifecycle import display

OFF = State("off", "not here")
MIXED = State("mixed", "on in worker 0; off: not here (worker 1)")
STORE = "/var/lib/features redis://user:secret@host:6379/0"


def made(**values: Any) -> settings.Settings:
    """Settings of these values, which need not be of the fields' own types."""
    return settings.Settings(**values)


@pytest.mark.parametrize("state", [ON, MIXED])
def test_where_features_are(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", made(store=STORE, feature_ram_bytes="1GiB"))
    (line,) = display.storage_summary({"features": state, "observe": OFF})
    assert line == (
        "features are kept: RAM (1.0GiB), /var/lib/features (10.0GiB at most), redis://***@host:6379/0; beyond RAM "
        "until unused for 7 days (MMCACHE_STORE_TTL)"
    )
    monkeypatch.setattr(settings, "_current", made(store="/a", store_ttl="0"))
    assert "/a (10.0GiB at most); beyond RAM until there is no room" in display.storage_summary({"features": state})[0]
    monkeypatch.setattr(settings, "_current", made(feature_ram_bytes=0))
    assert display.storage_summary({"features": state}) == ["features are kept: nowhere"]


def test_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(observe=True))
    assert display.storage_summary({"features": OFF, "observe": ON}) == ["requests are recorded"]
    monkeypatch.setattr(settings, "_current", settings.Settings(observe=True, observe_file="/a/file"))
    assert display.storage_summary({"observe": ON}) == ["requests are recorded: /a/file"]


@pytest.mark.parametrize("state", [OFF, State("unneeded", "no images")])
def test_nothing_is_said_of_what_is_not_so(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(store=STORE, observe=True))
    assert display.storage_summary({"features": state, "observe": state}) == display.storage_summary({}) == []


def test_as_json() -> None:
    off = {"state": "off", "reason": "not here"}
    try:
        status.settle({"api": {"identity": ON}, "engine 0": {"features": OFF}}, ("features",))
        assert status.as_json() == {
            "components": {"features": off},
            "rooms": {"features": off},
            "places": {"api": {"identity": {"state": "on", "reason": ""}}, "engine 0": {"features": off}},
        }
    finally:
        status.settle({}, ())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "http://127.0.0.1:8000/mmcache"),
        ({"host": "gpu-7", "port": 9000}, "http://gpu-7:9000/mmcache"),
        ({"host": "::1", "ssl_certfile": "cert.pem"}, "https://[::1]:8000/mmcache"),
        ({"uds": "/run/vllm.sock"}, "/mmcache on /run/vllm.sock"),
    ],
)
def test_where_the_page_is(given: dict[str, object], said: str) -> None:
    assert address(Namespace(**{"host": None, "port": 8000, "uds": None, "ssl_certfile": None, **given})) == said


def test_files_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(files="s3://bucket/files"))
    found = {"identity": ON, "lazy_media": ON}
    said = "files of clients are kept: s3://bucket/files, until 30 days after their upload"
    assert display.storage_summary(found) == [said]
    assert display.storage_summary({**found, "identity": OFF}) == []
    monkeypatch.setattr(settings, "_current", settings.Settings(files="ftp://a:secret@host/b"))
    assert "secret" not in str(display.storage_summary(found))
    monkeypatch.setattr(settings, "_current", settings.Settings(files="unix:///run/valkey.sock?password=secret"))
    assert "files of clients are kept: unix:///run/valkey.sock?***, until" in str(display.storage_summary(found))
    monkeypatch.setattr(settings, "_current", settings.Settings(files="/a", files_ttl=Duration(0)))
    assert display.storage_summary(found) == ["files of clients are kept: /a, until they are deleted"]
