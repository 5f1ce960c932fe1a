# SPDX-License-Identifier: Apache-2.0
"""The command `mmcache` as users run it: each in a subprocess, with its exit status and what it prints.

Every mistake must end with status 2 and one line on stderr, `error: ...`, before anything heavy starts.
"""

import contextlib
import importlib.metadata
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mmcache.base.errors import EnvironmentProblem, UnschedulableImage
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.cli import serve

COMMAND = [sys.executable, "-m", "vllm_mmcache.cli"]


def mmcache(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    return subprocess.run(
        [*COMMAND, *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env={**kept, **env},
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Enough of a model directory to pass the checks; vLLM itself would refuse it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


@pytest.fixture
def empty(tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


def assert_one_line(outcome: subprocess.CompletedProcess[str], *said: str) -> None:
    assert outcome.returncode == 2, outcome.stderr
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    for text in said:
        assert text in outcome.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such-verb"], "no-such-verb"),
        (["serve"], "model"),
        (["serve", "--port", "8000", "some-model"], "the model comes first, seen '--port'"),
        (["serve", "./no-such-directory"], "no model directory './no-such-directory'"),
        (["serve", "/no/such/directory"], "no model directory '/no/such/directory'"),
        (["serve", "~/no-such-directory"], "no model directory"),
        (["serve", "a/b/c"], "no model directory 'a/b/c'"),
        (["serve", ""], "no model directory ''"),
        (["serve", "some/model", "--port", "many"], "--port many: expected a number"),
        (["serve", "some/model", "--port=70000"], "--port 70000: expected a number"),
        (["serve", "some/model", "--host", "no-such-host.invalid"], "--host no-such-host.invalid"),
        (["demo", "--turns", "0"], "turns"),
        (["demo", "--no-such-option"], "--no-such-option"),
        (["demo", "--family", "no-such-family"], "no-such-family"),
        (["doctor", "--no-such-option"], "the model comes first, seen '--no-such-option'"),
        (["zoo", "build", "no-such-family", "somewhere"], "no-such-family"),
        (["zoo", "build", "qwen3-vl"], "dir"),
        (["zoo", "build", "qwen3-vl", "somewhere", "--seed", "x"], "seed"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], said: str, tmp_path: Path) -> None:
    outcome = mmcache(*args, cwd=tmp_path)
    assert_one_line(outcome)
    assert said.lower() in outcome.stderr.lower()


@pytest.mark.parametrize("model", ["s3://bucket/some/model", "gs://bucket/model", "S3://bucket/a/b/c", "az://a/b/c"])
def test_a_model_in_an_object_store_is_vllms_to_find(model: str) -> None:
    serve.check_before_start(model, ["--port", "0"])
    assert serve.command(model, [])[3:5] == ["serve", model]


def test_object_stores_are_those_of_vllm() -> None:
    from vllm.transformers_utils.runai_utils import SUPPORTED_SCHEMES

    assert sorted(serve.OBJECT_STORES) == sorted(SUPPORTED_SCHEMES)


@pytest.mark.parametrize("model", ["s4://bucket/some/model", "s3:/bucket/some/model", "s3:bucket/some/model"])
def test_what_is_no_object_store_is_refused(model: str) -> None:
    with pytest.raises(EnvironmentProblem, match="no model directory"):
        serve.check_before_start(model, ["--port", "0"])


@pytest.mark.process
def test_a_directory_without_a_model(empty: str) -> None:
    assert_one_line(mmcache("serve", empty), "is not a model directory: it has no config.json")


@pytest.mark.process
def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_one_line(mmcache("zoo", "build", "qwen3-vl", str(tmp_path / "file" / "model")), "file")


@pytest.mark.process
def test_a_port_in_use(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for args in (["--port", port], [f"--port={port}", "--host", "127.0.0.1"]):
            assert_one_line(mmcache("serve", model, *args), f":{port}", "in use", "--port")


@pytest.mark.process
@pytest.mark.parametrize("verb", [["serve", "some/model"], ["demo"]])
def test_a_wrong_setting(verb: list[str]) -> None:
    assert_one_line(mmcache(*verb, MMCACHE_BLOCK_KEYS="maybe"), "MMCACHE_BLOCK_KEYS", "maybe")
    assert_one_line(mmcache(*verb, MMCACHE_DISABLE="maybe"), "MMCACHE_DISABLE", "maybe")


@pytest.mark.process
def test_a_key_of_the_store_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("5a" * 32)
    (tmp_path / "key").chmod(0o644)
    for place, said in (("none", "No such file"), ("key", "others may read or change it: chmod 600")):
        outcome = mmcache("serve", "some/model", "--port", "0", MMCACHE_STORE_KEY_FILE=str(tmp_path / place))
        assert_one_line(outcome, f"store_key_file '{tmp_path / place}'", said)


@pytest.mark.process
def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """Judged by the modules that are loaded, since a busy machine has other times: 401 of them, numpy alone has 100."""
    code = """
import sys
try:
    import vllm_mmcache.cli.__main__
except SystemExit as ended:
    assert ended.code == 0, ended.code
print(len(sys.modules), {"vllm", "torch", "numpy", "openai", "transformers"} & set(sys.modules))
"""
    outcome = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    for verb in ("serve", "demo", "doctor", "zoo"):
        assert verb in outcome.stdout
    num_modules, heavy = outcome.stdout.splitlines()[-1].split(maxsplit=1)
    assert int(num_modules) < 480
    assert heavy == "set()"


@pytest.mark.process
def test_no_arguments_show_the_help() -> None:
    outcome = mmcache()
    assert outcome.returncode == 2
    assert "Usage:" in outcome.stdout + outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_serve_adds_its_defaults_unless_told_otherwise(tmp_path: Path) -> None:
    both = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    assert serve.with_defaults(["--port", "1"]) == ["--port", "1", *both]
    for said in ("--no-enable-prefix-caching", "--enable_prefix_caching", "--enable-prefix-caching"):
        assert serve.with_defaults([said]) == [said, both[1]]
    config = tmp_path / "config.yaml"
    config.write_text("enable_prefix_caching: false\n")
    assert serve.with_defaults(["--config", str(config)]) == ["--config", str(config), both[1]]


def test_serve_keeps_features_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def kept(*arguments: str, **variables: str) -> str | None:
        with monkeypatch.context() as patched:
            for name in ("MMCACHE_STORE", "XDG_CACHE_HOME"):
                # Set first, so that what the command sets is taken back, too.
                patched.setenv(name, "")
                patched.delenv(name)
            for name, value in variables.items():
                patched.setenv(name, value)
            said.append(serve.keep_features(arguments))
            return os.environ.get("MMCACHE_STORE")

    assert kept(XDG_CACHE_HOME=str(tmp_path)) == str(tmp_path / "mmcache")
    assert f"features kept in {tmp_path}/mmcache until unused for 7 days (" in said.pop()
    kept(XDG_CACHE_HOME=str(tmp_path), MMCACHE_STORE_TTL="90m")
    assert f"features kept in {tmp_path}/mmcache until unused for 90 minutes (" in said.pop()
    kept("--additional-config.mmcache.store_ttl", "3h", XDG_CACHE_HOME=str(tmp_path))
    assert "until unused for 3 hours (" in said.pop()
    kept("--additional-config", '{"kv": {"store": "/of/another"}}', XDG_CACHE_HOME=str(tmp_path))
    assert f"features kept in {tmp_path}/mmcache until" in said.pop(), "that of another plugin is none of ours"
    assert kept(HOME="/home/some", XDG_CACHE_HOME="relative") == "/home/some/.cache/mmcache"
    said.clear()
    assert kept(HOME="/home/with space") is None
    assert kept(MMCACHE_STORE="/else/where") == "/else/where"
    assert kept(MMCACHE_STORE="") == ""
    assert kept(MMCACHE_FEATURES="0") is None
    assert kept(MMCACHE_DISABLE="1") is None
    config = tmp_path / "config.yaml"
    config.write_text("additional_config: {mmcache: {store: /else/where}}\n")
    for arguments in (
        ["--additional-config", '{"mmcache": {"store": "/else/where"}}'],
        ["--additional-config", '{"mmcache": {"store": null}}'],
        ["--additional-config", '{"mmcache": {"features": false}}'],
        ["--additional-config.mmcache.store=/else/where"],
        ["--config", str(config)],
    ):
        assert kept(*arguments) is None
    assert set(said) == {""}


@pytest.mark.process
@pytest.mark.parametrize("named", ["", "other", "mmcache_observe"])
def test_serve_refuses_where_vllm_would_leave_us_out(named: str, model: str) -> None:
    """Nothing of ours would run, so nothing could refuse later, not even where salts are required."""
    for required in ("0", "1"):
        outcome = mmcache("serve", model, VLLM_PLUGINS=named, MMCACHE_REQUIRE_SALT=required)
        assert_one_line(outcome, f"VLLM_PLUGINS={named} leaves mmcache out", "name mmcache in VLLM_PLUGINS")


def test_serve_without_us_is_served_where_it_is_said(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with MMCACHE_DISABLE nothing of ours is wanted; and where we are named, all is well."""
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv("MMCACHE_DISABLE", "1")
    serve.check_before_start(model, ["--port", "0"])
    monkeypatch.setenv("MMCACHE_DISABLE", "0")
    with pytest.raises(EnvironmentProblem, match="leaves mmcache out"):
        serve.check_before_start(model, ["--port", "0"])
    monkeypatch.setenv("VLLM_PLUGINS", "other,mmcache")
    serve.check_before_start(model, ["--port", "0"])


@pytest.mark.process
def test_what_is_wanted_is_one_line(model: str, tmp_path: Path) -> None:
    """Before the start it is only a wish."""
    refused = ["--port", "0", "--no-such-vllm-option", "1"]
    outcome = mmcache("serve", "--observe", model, *refused, XDG_CACHE_HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path))
    said = outcome.stderr
    assert outcome.returncode == 2
    assert "vllm: error: unrecognized arguments: --no-such-vllm-option" in said, "vLLM's own answer"
    line, key = [line for line in said.splitlines() if line.startswith("mmcache:")]
    assert f"wanted: features kept in {tmp_path}/mmcache" in line
    assert "requests recorded. What is so, the server says when its engines are ready" in line
    path = tmp_path / "mmcache" / "admin-key"
    assert key.startswith(f"mmcache: the page is http://127.0.0.1:0/mmcache, its admin key is in {path} ")
    assert path.read_text().strip() not in outcome.stdout + said


@pytest.mark.process
def test_a_terminal_is_shown_the_admin_key(model: str, tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    command = [*COMMAND, "serve", "--observe", model, "--port", "0", "--no-such-vllm-option", "1"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    env = {**kept, "MMCACHE_STORE": "", "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=other_end, env=env)
    os.close(other_end)
    said = b""
    with contextlib.suppress(OSError):  # Linux says so at the end of a terminal
        while piece := os.read(terminal, 4096):
            said += piece
    os.close(terminal)
    process.wait()
    assert re.search(rb"the admin key of this start: http://127\.0\.0\.1:0/mmcache#key=[\w-]{43}\r\n", said)
    assert not (tmp_path / "mmcache").exists()


@pytest.mark.slow
def test_nothing_is_said_of_what_was_not_asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "become", lambda command: None)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MMCACHE_", "VLLM_PLUGINS"))}
    asked = {"MMCACHE_STORE": "", "MMCACHE_ADMIN_KEY": "a-key-of-the-operator"}
    monkeypatch.setattr(os, "environ", kept | asked)
    serve.serve(model, ["--port", "0"], observe=True)
    own = capsys.readouterr().err
    assert "wanted: requests recorded" in own
    assert "key" not in own
    monkeypatch.setattr(os, "environ", kept | asked)
    serve.serve(model, ["--port", "0"])
    assert "mmcache:" not in capsys.readouterr().err


def test_serve_works_with_both_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's main function is left as it is where its distribution has the name that it asks for."""
    import vllm.entrypoints.cli.run_batch  # noqa: F401  # what it loads asks for other versions
    from vllm.entrypoints.cli import main as vllm_cli

    from vllm_mmcache.cli import vllm_main

    assert "vllm_mmcache.cli.vllm_main" in serve.command("some/model", [])
    asked: list[object] = []
    monkeypatch.setattr(sys, "argv", ["mmcache"])
    monkeypatch.setattr(vllm_cli, "importlib", before := vllm_cli.importlib)
    monkeypatch.setattr(vllm_cli, "main", lambda: asked.append(vllm_cli.importlib))

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    for version in (lambda name: "0.33.0", missing):
        monkeypatch.setattr(importlib.metadata, "version", version)
        vllm_main.main()
    assert asked[0] is before
    assert asked[1].metadata.version("vllm") == vllm_version()  # type: ignore[attr-defined]


def test_what_mmcache_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.entrypoints.cli import main as vllm_cli

    from vllm_mmcache.cli import vllm_main

    def refuse() -> None:
        raise UnschedulableImage("every image is too long")

    monkeypatch.setattr(sys, "argv", ["mmcache"])
    monkeypatch.setattr(vllm_cli, "importlib", vllm_cli.importlib)
    monkeypatch.setattr(vllm_cli, "main", refuse)
    with pytest.raises(SystemExit) as ended:
        vllm_main.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: every image is too long\n"


@pytest.mark.process
def test_arguments_after_the_model_reach_vllm() -> None:
    # vLLM's own answer to --help, through the command it was given; to an unknown option: above.
    outcome = mmcache("serve", "some/model", "--help")
    assert outcome.returncode == 0
    assert "vllm serve --help=all" in outcome.stdout


@pytest.mark.process
def test_zoo_ls() -> None:
    outcome = mmcache("zoo", "ls")
    assert outcome.returncode == 0
    assert "qwen3-vl" in outcome.stdout.split()
