# SPDX-License-Identifier: Apache-2.0
"""What a machine without a network lacks goes there in pieces, and gpu-check runs there with it.

The other machine is a clean directory here, whose interpreter has a broken wrapt; packages come from a folder of
wheels, not from an index.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_check import found, results, ship, wheels
from tests.support.sizes import larger
from vllm_mmcache.lifecycle import tested_engines

SEND = """#!/bin/sh
rm -rf "$THERE/.artifacts/ship" && mkdir -p "$THERE/.artifacts/ship" && cp -r "$1" "$THERE/$1" && cd "$THERE" && $2
"""


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """A wheel with one empty module."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")
        file.writestr(f"{info}/RECORD", "")


def wheel_of_installed(folder: Path, name: str) -> None:
    """The wheel that an installed distribution came from, made of its files."""
    distribution = importlib.metadata.distribution(name)
    tag = next(line.split()[1] for line in (distribution.read_text("WHEEL") or "").splitlines() if "Tag:" in line)
    with zipfile.ZipFile(folder / f"{name}-{distribution.version}-{tag}.whl", "w") as file:
        for path in distribution.files or ():
            if ".." not in path.parts and "__pycache__" not in path.parts:
                file.write(str(distribution.locate_file(path)), str(path))


def names(paths: list[Path]) -> list[str]:
    return ["-".join(path.name.split("-")[:2]) for path in paths]


def machine(**packages: str) -> dict[str, Any]:
    return {"python": "3.12", "machine": "x86_64", "libc": [2, 28], "packages": packages}


def env(links: Path, **more: str) -> dict[str, str]:
    return os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)} | more


@pytest.mark.process
def test_what_a_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level by level, for that machine's Python; what it has and fits stays, also where others want another."""
    links = tmp_path / "links"
    links.mkdir()
    write_wheel(links, "engine", "1", "tensors==2.0", "kernels[fast]>=1", 'old; python_version < "3.12"', "nvtx")
    write_wheel(links, "kernels", "1.5", 'quick>=1; extra == "fast"', 'slow; extra == "slow"', "certs>=9")
    write_wheel(links, "kernels", "1.4")
    for name, version in (("tensors", "2.0"), ("quick", "1"), ("certs", "8"), ("slow", "1"), ("old", "1")):
        write_wheel(links, name, version)
    for variable, value in env(links).items():
        monkeypatch.setenv(variable, value)
    bare = machine()
    with pytest.raises(wheels.CannotHave, match="certs>=9"):
        wheels.download(["engine"], bare, [], tmp_path / "a")
    got = wheels.download(["engine"], bare, ["certs"], tmp_path / "b")
    assert names(got) == ["certs-8", "engine-1", "kernels-1.5", "quick-1", "tensors-2.0"], "nvtx is left out"
    assert names(wheels.download(["engine"], machine(tensors="2.0", certs="9.1"), [], tmp_path / "c")) == [
        "engine-1",
        "kernels-1.5",
        "quick-1",
    ]
    other = machine(tensors="1.9", certs="9")
    assert "tensors-2.0" in names(wheels.download(["engine"], other, [], tmp_path / "d"))
    assert "tensors-2.0" not in names(wheels.download(["engine"], other, ["tensors"], tmp_path / "e"))
    late = ["engine", "kernels<1.5"]  # asked for beside what another wheel wants
    assert "kernels-1.4" in names(wheels.download(late, machine(certs="9"), [], tmp_path / "f"))


def test_pieces_arrive_in_any_order_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    folder, sent, store, there = (tmp_path / name for name in ("folder", "sent", "store", "there"))
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "noise").write_bytes(os.urandom(25_000))
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    assert ship.split(folder, sent, 10_000) == 3
    assert [(sent / name / "piece").stat().st_size > 9999 for name in ("01", "02", "03")] == [True, True, False]

    assert ship.missing(store) == ["all"]
    for name in ("03", "01", "03"):
        assert ship.take(sent / name, store)
    assert ship.missing(store) == ["02"]
    whole = (sent / "02" / "piece").read_bytes()
    for spoiled in (whole[:-1], whole[:500] + bytes([whole[500] ^ 1]) + whole[501:]):
        (sent / "02" / "piece").write_bytes(spoiled)
        assert not ship.take(sent / "02", store)
        assert ship.missing(store) == ["02"]
    (sent / "02" / "piece").write_bytes(whole)
    assert ship.take(sent / "02", store)
    assert ship.missing(store) == []
    ship.join(store, there)
    assert (there / "inner" / "noise").read_bytes() == (folder / "inner" / "noise").read_bytes()
    assert os.access(there / "run", os.X_OK)
    assert not list(store.glob("whole"))

    (store / ship.digest_of(sent / "01" / "piece")).write_bytes(b"rotten")
    assert ship.missing(store) == ["01"], "what is damaged after it arrived can be sent again"


@larger
@pytest.mark.engine
def test_to_a_clean_directory(tmp_path: Path) -> None:
    """Packed here, sent piece by piece, unpacked there, and gpu-check with one engine, on the CPU."""
    here, there, links, broken = (tmp_path / name for name in ("here", "there", "links", "broken"))
    for checkout in (here, there):
        ignored = shutil.ignore_patterns(".git", ".venv*", ".artifacts", ".*_cache", "__pycache__", ".hypothesis")
        shutil.copytree(found.REPO, checkout, ignore=ignored)
    links.mkdir()
    for name in ("wrapt", "xxhash"):
        wheel_of_installed(links, name)
    broken.mkdir()
    (broken / "wrapt.py").write_text("raise ImportError('this machine has no wrapt')\n")
    (tmp_path / "send").write_text(SEND)
    outside = env(links, THERE=str(there), PYTHONPATH=str(broken), BENCH_COMMIT="abc")

    def do(where: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scripts.gpu_check.ship", *arguments]
        return subprocess.run(command, cwd=where, env=outside | more, capture_output=True, text=True, check=False)

    facts = json.loads(do(there, "look").stdout)
    assert facts["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    facts["packages"] = {name: v for name, v in facts["packages"].items() if name not in ("wrapt", "xxhash")}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    done = do(here, "pack", "--facts", str(tmp_path / "facts.json"), "--require", "numpy", "--piece-mib", "0.05")
    assert done.returncode == 0, done.stderr
    assert "2 wheels in " in done.stdout
    assert "wrapt-" in done.stdout

    send = ["send", "--through", f"sh {tmp_path / 'send'}", "--python", sys.executable]
    check = ["run", "--commit", "abc", "--out", str(tmp_path / "out"), "--", "--platform", "cpu", "--short"]
    check += ["--families", "qwen3-vl", "--runners", "V1"]
    done = do(here, *send, "--only", "01")
    assert (done.returncode, "missing: 02" in done.stdout) == (2, True), done.stdout + done.stderr
    done = do(there, *check)
    assert (done.returncode, done.stderr.startswith("error: pieces are missing: 02")) == (2, True), done.stderr
    second = here / ship.SENT / "02" / "piece"
    whole = second.read_bytes()
    second.write_bytes(bytes(len(whole)))
    done = do(here, *send)
    assert (done.returncode, "piece 02 is damaged" in done.stderr) == (1, True), done.stderr
    second.write_bytes(whole)
    done = do(here, *send)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (there / ship.ARRIVED / "environment" / "wrapt" / "__init__.py").is_file()

    done = do(there, *check)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = [path for path in (tmp_path / "out").glob("*.json") if "abc" in path.read_text()]
    result = json.loads(path.read_text())
    (item,) = result["items"].values()
    assert (item["state"], item["commit"]) == ("passed", "abc"), item
    assert "== qwen3-vl, all components, V1, eager: exit code 0" in (tmp_path / "out" / "gpu_check.log").read_text()

    shutil.rmtree(there / ship.ARRIVED / "environment" / "wrapt")
    done = do(there, *check)
    assert done.returncode != 0, "what was shipped is what ran"


def test_what_came_back_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.lab.gpu_check.test_gpu_check import result_of

    saved: list[tuple[Path, Mapping[str, Any]]] = []
    monkeypatch.setattr(results, "save", lambda path, result: saved.append((path, result)))
    monkeypatch.setattr(tested_engines, "FILE", tmp_path / "tested_engines.json")
    tested_engines.FILE.write_text("[]")
    result = result_of("cuda") | {"machine": "NVIDIA Some GPU"}
    del result["items"]["gemma3, image_spans, V2, eager"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert ship.record(argparse.Namespace(result=tmp_path / "result.json")) == 0
    assert saved == [(results.FOLDER / "nvidia-some-gpu.json", result)]
    assert [row.evidence for row in tested_engines.rows()] == ["scripts/gpu_check/results/nvidia-some-gpu.json"] * 2
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "image_spans" in line] == [line for line in said if "model runner V1" in line]
