# SPDX-License-Identifier: Apache-2.0
"""`mmcache store warm` as users run it: an engine of its own fills a store that a server then finds filled."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached

from tests.system.cli.test_commands import assert_one_line, mmcache
from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.base.tenant import parse_source
from vllm_mmcache.cli import warm
from vllm_mmcache.components.identity.identifiers import identifier
from vllm_mmcache.exactness.pictures import ellipses


@pytest.mark.process
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["/no/such/pictures", "--model", "m"], "/no/such/pictures can't be read"),
        (["."], "no model is given"),
        ([".", "--model", "m"], "there is no picture in ."),
        (["picture.png", "--model", "m"], "picture.png can't be read"),
        (["list", "--model", "m", "--batch", "0"], "batch"),
        (["list", "--model", "m", "--tenant", "a", "--tenant-file", "list"], "give one of the two"),
        (["list", "--model", "m", "--tenant", " "], "the name of the tenant is empty"),
        (["list", "--model", "m", "--tenant-file", "/no/such/file"], "--tenant-file '/no/such/file' can't be read"),
    ],
)
def test_mistakes(args: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    if args[0] != ".":
        ellipses("warm").save(tmp_path / "in" / "picture.png")
        (tmp_path / "in" / "list").write_text("picture.png\n")
    assert_one_line(mmcache("store", "warm", *args, cwd=tmp_path / "in"), said)


def test_the_store_is_that_of_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MMCACHE_STORE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        monkeypatch.setenv(name, "")  # so that what `prepare` sets is taken back
    with pytest.raises(StoreUnusable, match="MMCACHE_STORE asks for no store: use --dir PATH"):
        warm.prepare(None)
    monkeypatch.delenv("MMCACHE_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warm.prepare(None)
    assert os.environ["MMCACHE_STORE"] == str(tmp_path / "mmcache")
    warm.prepare(tmp_path / "another")
    assert os.environ["MMCACHE_STORE"] == str(tmp_path / "another")


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("no/such/model", [], "vLLM starts no engine: "),
        ("no/such/model", ["--max-model-len", "many"], "vLLM says of these arguments: "),
        ("no/such/model", ["--no-such-argument"], "vLLM says of these arguments: "),
    ],
)
def test_what_vllm_refuses_is_said_in_json(model: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    ellipses("warm").save(tmp_path / "picture.png")
    environ: dict[str, Any] = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    outcome = mmcache("store", "warm", str(tmp_path), "--model", model, "--json", "--", *arguments, **environ)
    assert outcome.returncode == 2, outcome.stderr[-3000:]
    error = json.loads(outcome.stdout)["error"]
    assert error.startswith(said)
    assert f"error: {error}\n" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.engine
def test_warm_fills_and_goes_on(tmp_path: Path) -> None:
    """Some pictures, then these and more: only what is new runs the tower. What is no picture is named."""
    model = build_cached("qwen3-vl", tmp_path / "zoo")
    pictures, store = tmp_path / "pictures", tmp_path / "store"
    (pictures / "below").mkdir(parents=True)
    for number in range(3):
        ellipses(f"warm {number}").save(pictures / "below" / f"{number}.png")
    (pictures / "broken.jpg").write_text("no picture")
    ellipses("cut").save(pictures / "cut.jpg")
    (pictures / "cut.jpg").write_bytes((pictures / "cut.jpg").read_bytes()[:-500])  # its head is whole
    (pictures / "notes.txt").write_text("not even by name")
    arguments = ["--dir", str(store), "--model", str(model), "--batch", "2", "--json", "--"]
    arguments += ["--max-model-len", "2048", "--enforce-eager", "--dtype", "float32"]
    environ: dict[str, Any] = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    listed = tmp_path / "list"
    listed.write_text("pictures/below/0.png\n\npictures/below/1.png\n")

    some = mmcache("store", "warm", str(listed), *arguments, **environ)
    assert some.returncode == 0, some.stderr[-3000:]
    assert json.loads(some.stdout) == {"encoded": 2, "present": 0, "failed": []}

    more = mmcache("store", "warm", str(pictures), *arguments, **environ)
    assert more.returncode == 1, more.stderr[-3000:]
    report = json.loads(more.stdout)
    assert (report["encoded"], report["present"]) == (1, 2)
    assert [failure["path"] for failure in report["failed"]] == [
        str(pictures / name) for name in ("broken.jpg", "cut.jpg")
    ]
    assert len(list((store / "features").glob("??/*.safetensors"))) == 3

    (tmp_path / "tenant").touch(0o600)
    (tmp_path / "tenant").write_text("acme\n")
    arguments[:0] = ["--tenant-file", str(tmp_path / "tenant")]
    theirs = mmcache("store", "warm", str(listed), *arguments, **environ, MMCACHE_TENANT_FROM="header:X-Tenant")
    assert theirs.returncode == 0, theirs.stderr[-3000:]
    assert json.loads(theirs.stdout) == {"encoded": 2, "present": 0, "failed": []}
    kept = json.loads(mmcache("store", "ls", "--dir", str(store), "--json").stdout)["packages"]
    salt = parse_source("header:X-Tenant").salt_of("acme")
    names = [package["content_id"] for package in kept]
    assert len(set(names)) == 5
    assert sum(identifier("image", name, salt=salt) in names for name in names) == 2
