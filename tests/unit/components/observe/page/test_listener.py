# SPDX-License-Identifier: Apache-2.0
"""The page on an address of its own: there and nowhere else, by one of several API servers, or no start."""

import time
from pathlib import Path

import httpx
import pytest
from mmcache_tools.harness.server import free_port
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.testclient import TestClient

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.store_url import host_and_port
from vllm_mmcache.cli import serve
from vllm_mmcache.components.observe.page.admin import admin_key
from vllm_mmcache.components.observe.page.endpoint import Endpoint, recorded
from vllm_mmcache.components.observe.page.listener import listen
from vllm_mmcache.components.observe.page.web import routes

KEY = "the-operator-has-this-one"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """A free one, and set."""
    found = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MMCACHE_OBSERVE_LISTEN", found)
    monkeypatch.setattr(settings, "_current", settings.Settings(admin_key=SecretStr(KEY)))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    return found


def test_there_and_not_on_the_clients_port(address: str) -> None:
    app = Starlette()
    Endpoint().attach_router(app)
    assert TestClient(app).get("/mmcache").status_code == 404
    page = f"http://{address}/mmcache"
    assert httpx.get(page, timeout=60).status_code == 200
    assert httpx.get(f"{page}/components", timeout=60).status_code == 401
    assert httpx.get(f"{page}/records", headers={"Authorization": f"Bearer {KEY}"}, timeout=60).status_code == 503
    assert serve.page_address([]) == page
    with pytest.raises(SettingsError, match="observe_listen"):
        Endpoint().attach_router(app)  # somebody has it


def test_the_first_of_several_serves_it(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = routes(recorded, admin_key(settings.current()), status.as_json)
    first = listen(address, ours)
    assert first is not None
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert listen(address, ours) is None
    first.should_exit = True
    deadline = time.monotonic() + 60
    while (again := listen(address, ours)) is None:  # its port is free again
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again.should_exit = True


@pytest.mark.parametrize(
    "address", ["", "9000", ":9000", "host", "host:0", "host:65536", "host:x", "::1:9000", "[h]:1"]
)
def test_what_is_no_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no HOST:PORT"):
        host_and_port(address)
    with pytest.raises(SettingsError, match="observe_listen"):
        settings.load_settings({"observe_listen": address})


def test_addresses() -> None:
    assert [host_and_port(text) for text in ("[::1]:9000", "127.0.0.1:1", "gpu-7:65535")] == [
        ("::1", 9000), ("127.0.0.1", 1), ("gpu-7", 65535),
    ]  # fmt: skip
