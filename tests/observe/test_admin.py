# SPDX-License-Identifier: Apache-2.0
"""The admin key: where it comes from, what is none, and that it is shown nowhere."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from vllm_mmcache import settings
from vllm_mmcache.cli import serve
from vllm_mmcache.errors import SettingsError
from vllm_mmcache.observe.admin import admin_key

KEY = "0123456789-secret-abcdef"
OTHER = "another-key-that-is-good"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "admin-key"
    path.write_text(f"{OTHER}\nwhat follows is left out: \u00e9\n")
    return path


def test_variable_and_file(monkeypatch: pytest.MonkeyPatch, key_file: Path) -> None:
    assert admin_key(settings.load_settings()) is None
    assert admin_key(settings.load_settings({"admin_key_file": str(key_file)})) == OTHER
    monkeypatch.setenv("MMCACHE_ADMIN_KEY_FILE", str(key_file))
    assert admin_key(settings.load_settings()) == OTHER
    monkeypatch.setenv("MMCACHE_ADMIN_KEY", KEY)
    assert admin_key(settings.load_settings()) == KEY, "the variable wins"


@pytest.mark.parametrize("key", ["short-secret", "secret" * 3 + " ", "s\u00e9cret" * 5, "secret" * 5 + "\x7f"])
def test_what_is_no_key_is_refused_and_not_said(key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MMCACHE_ADMIN_KEY", key)
    with pytest.raises(SettingsError, match="MMCACHE_ADMIN_KEY") as error:
        settings.load_settings()
    assert "cret" not in str(error.value)
    assert "16 printable ASCII" in str(error.value)
    monkeypatch.delenv("MMCACHE_ADMIN_KEY")
    path = tmp_path / "no-key"
    path.write_text(key)
    if key.strip() != key:  # a file's line may end in spaces
        return
    with pytest.raises(SettingsError, match="no-key") as error:
        admin_key(settings.load_settings({"admin_key_file": str(path)}))
    assert "cret" not in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path, said in (("none", "No such file"), ("", "directory"), ("empty", "16 printable")):
        with pytest.raises(SettingsError, match=said):
            admin_key(settings.Settings(admin_key_file=str(tmp_path / path)))


def test_it_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by repr, nor by doctor, nor in what travels with vLLM's configuration; no command line may hold it."""
    from vllm_mmcache.cli.doctor import setting_rows

    monkeypatch.setenv("MMCACHE_ADMIN_KEY", KEY)
    read = settings.load_settings({"observe": True})
    said = [repr(read), str(read), json.dumps(setting_rows(read)), json.dumps(settings.carried(read))]
    assert not [text for text in said if "secret" in text]
    assert {row["value"] for row in setting_rows(read) if row["variable"] == "MMCACHE_ADMIN_KEY"} == {"***"}
    assert settings.carried(read) == {"observe": True}
    assert admin_key(settings.received({"observe": True})) == KEY, "each API server reads its own variable"
    with pytest.raises(SettingsError, match=r"unknown setting additional-config mmcache\.admin_key") as error:
        settings.load_settings({"admin_key": KEY})
    assert "secret" not in str(error.value)


def test_serve_makes_one_where_none_is_set(monkeypatch: pytest.MonkeyPatch, key_file: Path) -> None:
    monkeypatch.setenv("MMCACHE_ADMIN_KEY", "")  # set first, so that what the command sets is taken back
    made = serve.make_admin_key()
    assert made is not None
    assert os.environ["MMCACHE_ADMIN_KEY"] == made == admin_key(settings.load_settings())
    assert serve.make_admin_key() is None, "the operator's is left alone, and not printed"
    monkeypatch.setenv("MMCACHE_ADMIN_KEY", "")
    assert serve.make_admin_key() not in (None, made)
    monkeypatch.setenv("MMCACHE_ADMIN_KEY", "")
    monkeypatch.setenv("MMCACHE_ADMIN_KEY_FILE", str(key_file))
    assert serve.make_admin_key() is None


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ([], "http://127.0.0.1:8000/mmcache"),
        (["--host", "0.0.0.0", "--port=9000"], "http://127.0.0.1:9000/mmcache"),
        (["--host", "gpu-7"], "http://gpu-7:8000/mmcache"),
        (["--host", "::1", "--ssl-certfile", "cert.pem"], "https://[::1]:8000/mmcache"),
        (["--uds", "/run/vllm.sock"], "/mmcache"),
        (["--config", "vllm.yaml"], "/mmcache"),
    ],
)
def test_the_link(arguments: list[str], address: str) -> None:
    assert serve.page_address(arguments) == address


def test_the_routes_take_the_admin_key_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever keys vLLM has for its clients; a key file that can't be read ends the start."""
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    from vllm_mmcache.observe.endpoint import Endpoint

    monkeypatch.setenv("VLLM_API_KEY", "a key of all clients")
    statuses = {}
    for name, key in (("none", None), ("one", KEY)):
        app = Starlette()
        app.state.args = Namespace(api_key=["another key of all clients"])
        monkeypatch.setattr(settings, "_current", settings.Settings(admin_key=key))
        Endpoint().attach_router(app)
        client = TestClient(app)
        given = (None, "a key of all clients", "another key of all clients", KEY)
        statuses[name] = [
            client.get("/mmcache/records", headers={"Authorization": f"Bearer {key}"} if key else {}).status_code
            for key in given
        ]
    assert statuses == {"none": [403] * 4, "one": [401, 401, 401, 503]}
    monkeypatch.setattr(settings, "_current", settings.Settings(admin_key_file=str(tmp_path / "none")))
    with pytest.raises(SettingsError, match="No such file"):
        Endpoint().attach_router(Starlette())
