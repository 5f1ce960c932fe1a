# SPDX-License-Identifier: Apache-2.0
"""The admin key: where it comes from, what is none, and that it is shown nowhere."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import SecretStr

from vllm_mmcache.base import settings
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.cli import serve
from vllm_mmcache.components.observe.page.admin import admin_key, read

KEY = "0123456789-secret-abcdef"
OTHER = "another-key-that-is-good"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "admin-key"
    path.touch(0o600)
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
    path.touch(0o600)
    path.write_text(key)
    if key.strip() != key:  # a file's line may end in spaces
        return
    with pytest.raises(SettingsError, match="no-key") as error:
        admin_key(settings.load_settings({"admin_key_file": str(path)}))
    assert "cret" not in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch(0o600)
    for path, said in (("none", "No such file"), ("", "no file"), ("empty", "16 printable")):
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


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Do what `mmcache serve --observe` does about the key; returns what it says."""

    def provide(on_terminal: bool = False, arguments: Sequence[str] = (), **variables: str) -> str:
        for name in ("MMCACHE_ADMIN_KEY", "MMCACHE_ADMIN_KEY_FILE"):
            monkeypatch.setenv(name, variables.get(name, ""))  # set first, so that what the command sets is taken back
        monkeypatch.setenv("XDG_STATE_HOME", variables.get("XDG_STATE_HOME", str(tmp_path)))
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: on_terminal))
        return serve.provide_admin_key(["--port", "1", *arguments])

    return provide


def test_a_terminal_is_shown_the_key_of_this_start(start: Callable[..., str], tmp_path: Path) -> None:
    said = start(on_terminal=True)
    made = os.environ["MMCACHE_ADMIN_KEY"]
    assert said == f"the admin key of this start: http://127.0.0.1:1/mmcache#key={made}"
    assert made == admin_key(settings.load_settings())
    assert start(on_terminal=True) != said, "each start has its own"
    assert not list(tmp_path.iterdir())


def test_a_log_is_told_the_file_of_the_key(start: Callable[..., str], tmp_path: Path) -> None:
    """What is no terminal is kept by somebody, as the log of a container."""
    said = start()
    path = tmp_path / "mmcache" / "admin-key"
    made = path.read_text().strip()
    assert admin_key(settings.load_settings()) == made
    assert len(made) == 43
    assert made not in said
    assert str(path) in said
    assert "http://127.0.0.1:1/mmcache" in said
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [one.name for one in path.parent.iterdir()] == ["admin-key"]
    assert start() == said, "made once, so two servers of one user have one key"
    assert path.read_text().strip() == made
    path.chmod(0o644)
    read.cache_clear()
    with pytest.raises(SettingsError, match="chmod 600"):
        start()


def test_where_no_file_can_be_made_it_is_said(start: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = start(XDG_STATE_HOME=str(tmp_path / "file"))
    assert "/mmcache tells nothing: name a file that holds one with MMCACHE_ADMIN_KEY_FILE" in said
    assert admin_key(settings.load_settings()) is None


def test_the_operators_key_is_left_alone(start: Callable[..., str], key_file: Path, tmp_path: Path) -> None:
    for on_terminal in (True, False):
        assert start(on_terminal, MMCACHE_ADMIN_KEY=KEY) == ""
        assert start(on_terminal, MMCACHE_ADMIN_KEY_FILE=str(key_file)) == ""
    assert not (tmp_path / "mmcache").exists()


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_operators_key_in_the_arguments_is_left_alone(
    on_terminal: bool, start: Callable[..., str], key_file: Path, tmp_path: Path
) -> None:
    """In each form that vLLM takes; a key that is made would win over it, or not be the one in force."""
    ours = {"admin_key_file": str(key_file)}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"additional_config": {"mmcache": ours}}))
    for arguments in (
        ["--additional-config", json.dumps({"mmcache": ours})],
        [f"--additional_config={json.dumps({'mmcache': ours})}"],
        ["--additional-config.mmcache", json.dumps(ours)],
        ["--additional-config.mmcache.admin_key_file", str(key_file)],
        [f"--additional_config.mmcache.admin_key_file={key_file}", "--additional-config.mmcache.media_records=64k"],
        ["--config", str(config)],
    ):
        assert start(on_terminal, arguments) == ""
        assert not os.environ["MMCACHE_ADMIN_KEY"]
        assert not os.environ["MMCACHE_ADMIN_KEY_FILE"]
    for arguments in (  # negative control: of several places vLLM takes the last alone
        ["--config", str(config), "--additional-config", "{}"],
        ["--additional-config", json.dumps({"mmcache": ours}), "--additional-config.of.another", "1"],
    ):
        assert start(on_terminal, arguments) != ""


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ([], "http://127.0.0.1:8000/mmcache"),
        (["--host", "0.0.0.0", "--port=9000"], "http://127.0.0.1:9000/mmcache"),
        (["--host", "gpu-7"], "http://gpu-7:8000/mmcache"),
        (["--host", "::1", "--ssl-certfile", "cert.pem"], "https://[::1]:8000/mmcache"),
        (["--uds", "/run/vllm.sock"], "/mmcache"),
        (["--config", "vllm.yaml"], "/mmcache"),
        (["--additional-config", '{"mmcache": {"observe_listen": "10.0.0.1:9"}}'], "http://10.0.0.1:9/mmcache"),
        (["--port", "1", "--additional-config.mmcache.observe_listen=10.0.0.1:9"], "http://10.0.0.1:9/mmcache"),
    ],
)
def test_the_link(arguments: list[str], address: str) -> None:
    assert serve.page_address(arguments) == address


def test_the_routes_take_the_admin_key_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever keys vLLM has for its clients; a key file that can't be read ends the start."""
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    from vllm_mmcache.components.observe.page.endpoint import Endpoint

    monkeypatch.setenv("VLLM_API_KEY", "a key of all clients")
    statuses = {}
    for name, key in (("none", None), ("one", KEY)):
        app = Starlette()
        app.state.args = Namespace(api_key=["another key of all clients"])
        monkeypatch.setattr(settings, "_current", settings.Settings(admin_key=SecretStr(key) if key else None))
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
