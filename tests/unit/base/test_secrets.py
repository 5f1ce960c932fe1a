# SPDX-License-Identifier: Apache-2.0
"""Where secrets come from, and that no message, log line or command line has one: passwords of a store in every form.

The whole of it, on a server that runs: tests/system/identity/test_nothing_tells.py.
"""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote

import pytest

from vllm_mmcache.base import settings
from vllm_mmcache.base.errors import EnvironmentProblem, SettingsError
from vllm_mmcache.base.store_url import error_without_secrets, redact, with_password
from vllm_mmcache.cli import serve
from vllm_mmcache.cli.doctor import setting_rows
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.tier import Tier

PASSWORDS = [
    "s3cretw0rd",
    "s3cret/w0rd",
    "s3cret@w0rd",
    "s3cret w0rd",
    "s3cret%w0rd",
    "s3cret:w0rd",
    "s3cret,w?rd#&=\n",
]
WHERE = {
    "userinfo": "redis://user:{}@127.0.0.1:1/0",
    "no user": "rediss://:{}@localhost",
    "valkey": "valkey://user:{}@[::1]:1",
    "option of a socket": "unix:///run/valkey.sock?password={}",
    "userinfo of a socket": "unix://user:{}@/run/valkey.sock?db=1",
    "first of several options": "redis://127.0.0.1:1/0?password={}&db=0",
    "last of several options": "redis://127.0.0.1:1/0?db=0&username=user&password={}",
    "password of a key": "rediss://127.0.0.1:1/0?ssl_keyfile=/etc/key&ssl_password={}",
    "both": "redis://user:{}@127.0.0.1:1?password={}",
}


def tells(text: str) -> bool:
    return any(piece in form for form in (text, unquote(text)) for piece in ("s3cret", "w?rd", "w0rd"))


def attempt(make: Callable[[], Any]) -> tuple[Any, SettingsError | None]:
    """What is made, or the error in its place."""
    try:
        return make(), None
    except SettingsError as error:
        return None, error


@pytest.mark.slow
@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("form", WHERE.values(), ids=WHERE)
@pytest.mark.parametrize("is_quoted", [True, False], ids=["quoted", "as it is"])
def test_no_message_has_the_password(
    form: str, password: str, is_quoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is shown of a store that works, nor what is said of one that does not."""
    url = form.replace("{}", quote(password, safe="") if is_quoted else password)
    for store in (url, f"/a/directory {url}", f"{url},/a/directory", f"{url} nothing", url.replace(":1", ":port")):
        monkeypatch.setenv("MMCACHE_STORE", store)
        chosen, error = attempt(settings.load_settings)
        said = [json.dumps(setting_rows(chosen)), redact(store)]
        assert not [text for text in (*said, str(error)) if tells(text)], store
        assert "***" in said[1]
        assert error is None or error.__suppress_context__
    more = "&" if "?" in form else "?"
    for wrong in (f"{url}{more}no_such_option=1", f"{url}{more}protocol=x", f"{url}{more}ssl_cert_reqs=none&db=x"):
        made, error = attempt(partial(RedisBackend, wrong, FEATURES, ttl_s=1, timeout_s=0.02, max_bytes=1))
        assert not tells(str(error) if error else made.where + Tier(FEATURES, made).where), wrong


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("is_quoted", [True, False], ids=["quoted", "as it is"])
@pytest.mark.parametrize(
    "form",
    [
        "ftp://user:{}@host:21/files",
        "sftp://:{}@[::1]/files",
        "smb://domain;user:{}@host/share/files",
        "s3://bucket/files?secret={}&region=here",
        "s3://bucket/files#{}",
        "redis://:{}@cache:6379",
        "simplecache::ftp://user:{}@host/files",
    ],
)
def test_no_message_about_files_has_the_password(
    form: str, password: str, is_quoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = quote(password, safe="") if is_quoted else password
    url = form.format(secret)
    for files in (url, f"/a/directory {url}", f"{url} /a/directory", url.replace("host", "ho\nst")):
        monkeypatch.setenv("MMCACHE_FILES", files)
        chosen, error = attempt(settings.load_settings)
        raised = ValueError(f"no {files}, no {secret}, no {password}")
        said = [redact(files), json.dumps(setting_rows(chosen)), str(error), error_without_secrets(raised, url)]
        assert not [text for text in said if tells(text)], files
        assert "***" in said[0]


def test_what_is_shown_is_still_of_use() -> None:
    assert redact("redis://u:p@cache:6379/3") == "redis://***@cache:6379/3"
    assert redact("rediss+cluster://u:p@a:1,[::1]:2") == "rediss+cluster://***@a:1,[::1]:2"
    assert redact("/a/store valkeys://[::1]:6379") == "/a/store valkeys://[::1]:6379"
    assert redact("unix:///run/valkey.sock?password=p") == "unix:///run/valkey.sock?***"
    assert redact("/a/file@home") == "/a/file@home"
    for url in ("s3://bucket/folder", "gs://bucket/a folder/b", "file:///srv/files", "http://[::1]:9000/x"):
        assert redact(url) == url
    assert redact("ftp://user:p@host:21/files") == "ftp://***@host:21/files"
    assert redact("s3://bucket/folder?endpoint=e") == "s3://bucket/folder?***"
    assert redact("s3://bucket/folder#part") == "s3://bucket/folder#***"
    assert redact("s3://user:s3cretw0rd/bucket") == "s3://***", "no host, so what there is may be a password"
    assert redact(7) == 7
    assert redact(None) is None


@pytest.mark.parametrize("store", ["user:s3cretw0rd@host:6379", "http://user:s3cretw0rd@host", "redis://user:s3cretw0rd",
                                   "redis://us\u2100er:s3cretw0rd@host", "redis://:s3cretw0rd@[host",
                                   "s3cretw0rd@host redis://a", "redis://:12/s3cretw0rd@host"])  # fmt: skip
def test_what_is_no_store_is_not_quoted(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCACHE_STORE", store)
    with pytest.raises(SettingsError, match="MMCACHE_STORE") as error:
        settings.load_settings()
    assert not tells(str(error.value))


@pytest.mark.parametrize(
    "url",
    [
        f"{begin}{cut}s3cretw0rd@{end}"
        for begin, end in (
            ("redis://:12", "host:6379"),
            ("redis+cluster://user:12", "a:1,b:2"),
            ("unix://user:12", "/run/valkey.sock"),
            ("ftp://user:12", "host/files"),
        )
        for cut in "/?#"
    ],
)
def test_of_a_url_that_can_be_read_in_two_ways_only_the_scheme_is_shown(url: str) -> None:
    """What stands before a / in a password looks like a host and its port."""
    assert redact(url) == f"{url.partition(':')[0]}://***"
    assert redact(f"/a/directory {url}").endswith("://***")


@pytest.mark.parametrize("store", [["redis://:s3cretw0rd@h"], {"url": "redis://:s3cretw0rd@h"}])
def test_what_is_no_text_is_not_quoted(store: object) -> None:
    for config in ({"store": store}, {"store": "/a", "observe_file": store}):
        with pytest.raises(SettingsError, match="is not allowed") as error:
            settings.load_settings(config)
        assert not tells(str(error.value))
    with pytest.raises(SettingsError, match="expected an object") as error:
        settings.config_of(SimpleNamespace(additional_config={"mmcache": [store]}))
    assert not tells(str(error.value))


def test_settings_are_shown_without_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCACHE_STORE", "redis://:s3cretw0rd@127.0.0.1:6379")
    assert not tells(f"{settings.load_settings()!r} {settings.load_settings()}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "form"),
    [
        ("store", "redis://:{}@127.0.0.1:6379"),
        ("store", "unix:///run/a.sock?password={}"),
        ("store", "/a redis://u:{}@b"),
        ("store", "rediss://b?ssl_password={}"),
        ("files", "redis://:{}@127.0.0.1:6379"),
        ("files", "ftp://user:{}@host/files"),
    ],
)
def test_the_command_line_holds_no_password(
    setting: str, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Everybody reads it, and vLLM logs it: refused, by `mmcache serve` before anything starts."""
    value = form.format("s3cretw0rd")
    said = f"MMCACHE_{setting.upper()} instead"
    with pytest.raises(SettingsError, match=said) as error:
        settings.load_settings({setting: value})
    assert not tells(str(error.value))
    assert ("MMCACHE_STORE_PASSWORD_FILE" in str(error.value)) == (setting == "store")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"additional_config": {"mmcache": {setting: value}}}))
    for arguments in (
        ["--additional-config", json.dumps({"mmcache": {setting: value}})],
        [f"--additional_config={json.dumps({'mmcache': {setting: value}})}"],
        ["--additional-config.mmcache", json.dumps({setting: value})],
        [f"--additional-config.mmcache.{setting}", value],
        [f"--additional-config.mmcache.{setting}={value}"],
        ["--config", str(config)],
    ):
        with pytest.raises(EnvironmentProblem, match=said) as refused:
            serve.check_before_start("some/model", [*arguments, "--port", "0"])
        assert not tells(str(refused.value))
    monkeypatch.setenv(f"MMCACHE_{setting.upper()}", value)
    assert getattr(settings.load_settings(), setting) == value, "in the variable it is where it may be"


def test_the_command_line_may_name_a_store() -> None:
    """Negative control: what has no password is taken, and what is another's is another's."""
    kept = {"store": "/a redis://user@b:6379?db=1", "files": "s3://bucket/folder"}
    assert settings.load_settings(kept).model_dump(include=set(kept)) == kept
    other = {"kv": {"url": "redis://:s3cretw0rd@b"}}
    for arguments in (
        ["--additional-config", json.dumps({"mmcache": kept})],
        ["--kv-transfer-config", json.dumps(other)],
    ):
        serve.check_before_start("some/model", [*arguments, "--port", "0"])


def test_settings_travel_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes get the store beside vLLM's configuration, of which vLLM's log shows what repr does."""
    from vllm_mmcache.base import config_payload

    monkeypatch.setenv("MMCACHE_STORE", "redis://:s3cretw0rd@b")
    config = SimpleNamespace(additional_config={"mmcache": {}})
    config_payload.carry(config, settings.load_settings())
    assert settings.received(config_payload.carried(config) or {}).store == "redis://:s3cretw0rd@b"
    assert not tells(repr(config.additional_config) + str(config) + json.dumps(config.additional_config))


@pytest.mark.parametrize("password", PASSWORDS[:-1])
def test_a_password_from_a_file(password: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redis.connection import parse_url

    path = tmp_path / "password"
    path.touch(0o600)
    path.write_text(f"{password}\nwhat follows is left out")
    for url, user in (("redis://h:1/0", None), ("redis://me@h:1/0", "me"), ("unix:///run/a.sock", None)):
        whole = with_password(url, str(path))
        assert parse_url(whole)["password"] == password
        assert parse_url(whole).get("username") == user
        assert {**parse_url(whole), "password": 0, "username": 0} == {**parse_url(url), "password": 0, "username": 0}
        assert not tells(redact(whole))
    assert with_password("redis://h", None) == "redis://h"
    monkeypatch.setenv("MMCACHE_STORE_PASSWORD_FILE", str(path))
    chosen = settings.load_settings({"store": "/a redis://h"})
    assert settings.store_in_use(chosen) == ("/a", with_password("redis://h", str(path)))
    assert not tells(repr(chosen) + json.dumps(settings.carried(chosen)) + json.dumps(setting_rows(chosen)))
    monkeypatch.setenv("MMCACHE_STORE", "redis://:other@h")
    with pytest.raises(SettingsError, match="leave out one of the two"):
        settings.load_settings()


NAMES = ("store_key_file", "admin_key_file", "store_password_file")


def read_file(name: str, path: str) -> object:
    """Read the secret of the setting `name` as a server does."""
    from vllm_mmcache.components.observe.page.admin import admin_key

    return admin_key(settings.load_settings({name: path, "store": "redis://h"}))


@pytest.mark.parametrize("name", NAMES)
def test_files_of_secrets(name: str, tmp_path: Path) -> None:
    """One rule for all: a regular file, small, that nobody else reads or changes; a message shows nothing of it."""
    good = "5a" * 32
    path = tmp_path / "file"
    path.touch(0o600)
    path.write_text(f"{good}\n")
    read_file(name, str(path))
    path.chmod(0o440)  # as a secret of a group
    read_file(name, str(path))
    cases: list[tuple[str, str]] = []
    for mode in (0o604, 0o620, 0o602, 0o644):
        other = tmp_path / f"{mode:o}"
        other.touch()
        other.write_text(good)
        other.chmod(mode)
        cases.append((str(other), f"chmod 600 {other}"))
    for content in ("", "\n", "x" * 5000, "s3cret\u00e9w0rd" if name != "store_password_file" else "\nx"):
        other = tmp_path / f"content {len(content)}"
        other.touch(0o600)
        other.write_text(content)
        cases.append((str(other), name))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    cases += [(str(tmp_path / "none"), "No such file"), (str(tmp_path), "no file"), (str(pipe), "no file")]
    cases += [("~no-such-user-s3cret/x", "no user")]
    for place, said in cases:
        with pytest.raises(SettingsError, match=re.escape(said)) as error:
            read_file(name, place)
        assert name in str(error.value)
        assert not [text for text in (good, "s3cret\u00e9", "xxxx") if text in str(error.value)]


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_in_the_place_of_its_file_is_not_quoted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"MMCACHE_{name.upper()}", "s3cretw0rd" * 3)
    with pytest.raises(SettingsError, match=name) as error:
        read_file(name, "s3cretw0rd" * 3)
    assert not tells(str(error.value))


def test_an_error_about_a_url_hides_its_secrets() -> None:
    url = "redis://user:s3cret%20w0rd@h:1?ssl_password=an0ther"
    said = f"no s3cret w0rd, no s3cret%20w0rd, an0ther, {url}"
    hidden = error_without_secrets(ValueError(said), url)
    assert hidden == "no ***, no ***, ***, redis://***@h:1?***"
    assert error_without_secrets(OSError("Error 111 connecting to h:1"), url) == "Error 111 connecting to h:1"


def test_an_error_about_a_place_of_files_is_of_use() -> None:
    url = "ftp://user:s3cret%20w0rd@h/files?token=an0ther"
    said = f"no s3cret w0rd, no s3cret%20w0rd, an0ther, {url}"
    assert error_without_secrets(ValueError(said), url) == "no ***, no ***, ***, ftp://***@h/files?***"
    for place in ("/a/directory", "~/a/directory", "nowhere://bucket/folder"):
        assert error_without_secrets(ValueError(f"not known: {place}"), place) == f"not known: {place}"
