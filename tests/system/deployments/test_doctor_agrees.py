# SPDX-License-Identifier: Apache-2.0
"""`mmcache doctor` says of a deployment what its server then reports: each component's state and reason.

Both get the same arguments and the same environment. What only a start can tell, the doctor has to say as such.
"""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from mmcache_tools.harness.server import CPU_ARGS, free_port, wait_until_healthy
from mmcache_tools.zoo import build_cached

from tests.support.deployment import (
    TWO_RANKS,
    Component,
    Deployment,
    deployed,
    environment,
    installed_plugin,
    plant,
    start,
)
from tests.support.engine_configuration import CHOSEN
from tests.support.sizes import larger
from tests.support.vllm_tree import apply, copy_installed
from tests.system.deployments.test_headless import group, second_node
from tests.system.deployments.test_ranks import UNFIT
from tests.system.deployments.test_renderers import PLUGIN, RENDERER
from tests.system.deployments.test_servers import NO_TABLE
from vllm_mmcache.lifecycle.activation import IF_TRIED
from vllm_mmcache.lifecycle.config_rules import NO_PYTHON
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES, COMPONENTS, parts

ROOT = Path(__file__).parents[3]
KEY = "a-key-of-the-administrator"
ARGS = (*CPU_ARGS, "--max-model-len", "2048", "--limit-mm-per-prompt", '{"image": 2}')
ADDITIONAL = "--additional-config"
RENDERER_OF_VLLM = ("--tokenizer-mode", "deepseek_v32", "--prefix-caching-hash-algo", "sha256_cbor")

MAY_BE = {
    COMPONENTS["features"].on_if: (
        r"not written for this model runner|load format|.* could not be tried|.*, says a test \(worker 1\)"
    ),
    COMPONENTS["image_checkpoints"].on_if: "this model keeps every block's KV",
    COMPONENTS["inner_checkpoints"].on_if: r"layers of the kind \w+ are not known",
    IF_TRIED: "its trial on this engine was not exact",
}
"""The only differences that are allowed: a condition under which the doctor says that a component is on, since loading
the model or the trial decides, and the pattern of the reasons that a server may have instead."""
ON_ANOTHER_NODE = "it has no mmcache (engine 1)"
"""What a server may say of a component that works in an engine, where the doctor's notes say that it saw one node."""

ALIKE = "One process or several, with all ranks alike"
NOT_HERE = {
    "A rank does not run the plugin": "nothing but a planted fault does that to a worker of the same environment",
    "A Ray node where the plugin is not installed": "Ray is not installed, and there is no report",
    "A head node without the plugin, and a headless node with it": "there is no report: see test_headless.py",
    "A scheduler (`--scheduler-cls`) that is not derived from vLLM's": "there is none to serve with: see unit tests",
}
"""Rows of the table of docs/deployments.md that are not compared, and why."""
APART = ("A headless node without the plugin", "The Rust frontend", "`VLLM_PLUGINS` without `mmcache`")
"""Rows with a test of their own below."""


@dataclass(frozen=True)
class Case:
    """A deployment: its row in the table, its model, arguments and variables, and what only its start tells."""

    row: str
    family: str = "qwen3-vl"
    args: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    site: Callable[[Path], Path] | None = None
    """Makes a folder for PYTHONPATH."""
    told_at_start: Mapping[str, Component] = field(default_factory=dict)
    """Of components of which the doctor says when they are on, what the server then says if they are not."""


EVERY_BLOCK = {"image_checkpoints": ("unneeded", "this model keeps every block's KV")}


def third_party(folder: Path) -> Path:
    path = installed_plugin(folder, "third_party", PLUGIN)
    (path / "third_party_renderer.py").write_text(RENDERER)
    return path


def fork(folder: Path) -> Path:
    tree = copy_installed(folder)
    assert apply(tree).returncode == 0
    return tree


def connector(name: str) -> str:
    return json.dumps({"kv_connector": name, "kv_role": "kv_both"})


CASES: dict[str, Case] = {
    "observed": Case(ALIKE, "gemma3", ("--observe",), {"MMCACHE_ADMIN_KEY": KEY}),
    "renderer of vLLM": Case(
        "A renderer of vLLM other than `HfRenderer`", args=RENDERER_OF_VLLM, told_at_start=EVERY_BLOCK
    ),
    "additional config": Case(
        "Settings in `--additional-config`",
        "qwen3.5",
        (ADDITIONAL, '{"mmcache": {"image_checkpoints": false, "lazy_media": false}}'),
        {"MMCACHE_IMAGE_CHECKPOINTS": "1"},
    ),
}
"""What CI runs."""
MORE_CASES: dict[str, Case] = {
    "ranks": Case(ALIKE, args=TWO_RANKS, told_at_start=EVERY_BLOCK),
    "hybrid": Case(ALIKE, "qwen3.5"),
    "other Mamba layers": Case(
        ALIKE, "lfm2-vl", told_at_start={"inner_checkpoints": ("off", "layers of the kind ShortConv are not known")}
    ),
    "one rank is unlike": Case(
        "A component is off in one rank",
        args=TWO_RANKS,
        site=lambda folder: plant(
            folder, "vllm_mmcache.components.features.worker.opening", "VllmWorker-1", UNFIT["before the tower runs"]
        ),
        told_at_start={"features": ("off", "it is unlike the others, says a test (worker 1)"), **EVERY_BLOCK},
    ),
    "tried": Case(
        "An engine on which nobody has tried the components",
        site=lambda folder: plant(folder, *NO_TABLE),
        variables={"MMCACHE_TRIAL_S": "600"},
        told_at_start=EVERY_BLOCK,
    ),
    "not tried": Case(
        "An engine on which nobody has tried the components",
        site=lambda folder: plant(folder, *NO_TABLE),
        variables={"MMCACHE_TRIAL_S": "0"},
    ),
    "two of each": Case(
        "Several API servers, data parallel",
        args=("--api-server-count", "2", "--data-parallel-size", "2"),
        told_at_start=EVERY_BLOCK,
    ),
    "third party's renderer": Case(
        "A third party's renderer that does not go through vLLM's own",
        args=("--tokenizer-mode", "third"),
        site=third_party,
        told_at_start=EVERY_BLOCK,
    ),
    "fork": Case("A [patched](../patches/README.md) fork of vLLM", site=fork),
    # features of vLLM, as in docs/composes.md
    "uncached": Case(ALIKE, "gemma3", ("--no-enable-prefix-caching", "--disable-log-stats")),
    "no images": Case(ALIKE, "gemma3", ("--limit-mm-per-prompt", '{"image": 0}')),
    "pooling": Case(ALIKE, args=("--runner", "pooling"), told_at_start=EVERY_BLOCK),
    "shm": Case(ALIKE, args=("--mm-processor-cache-type", "shm"), told_at_start=EVERY_BLOCK),
    "lora": Case(ALIKE, args=("--enable-lora", "--enable-tower-connector-lora"), told_at_start=EVERY_BLOCK),
    "ngram": Case(
        ALIKE,
        "gemma3",
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}'),
    ),
    "kv connector": Case(
        ALIKE, args=("--kv-transfer-config", connector("ExampleConnector")), told_at_start=EVERY_BLOCK
    ),
}
"""What `make matrix` runs."""


def test_the_table_of_deployments_is_covered() -> None:
    lines = (ROOT / "docs" / "deployments.md").read_text().splitlines()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][1:]
    assert {case.row for case in (CASES | MORE_CASES).values()} | set(NOT_HERE) | set(APART) == set(rows)


def doctor_says(model: Path, args: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, Any]:
    """What `mmcache doctor --json` prints, whose exit status says whether there are findings."""
    command = [sys.executable, "-m", "vllm_mmcache.cli", "doctor", str(model), *args, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if said["findings"] else 0)
    return said


@contextlib.contextmanager
def served(model: Path, log_path: Path, args: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[Deployment]:
    """`mmcache serve` until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_mmcache.cli", "serve", str(model), "--host", "127.0.0.1"]
    with start(log_path, [*command, "--port", str(port), *args], environ) as process:
        running = Deployment(f"http://127.0.0.1:{port}", log_path, process)
        wait_until_healthy(running, 900)
        yield running


def line_of(components: Mapping[str, Component]) -> str:
    """The part of the line `in force` that says these states, as lifecycle/activation.py writes it."""
    on = ", ".join(name for name, (state, _) in components.items() if state == "on") or "nothing"
    kinds = {
        kind: ", ".join(f"{name} ({reason})" for name, (state, reason) in components.items() if state == kind)
        for kind in ("mixed", "off", "unneeded")
    }
    return on + "".join(f"; {kind}: {said}" for kind, said in kinds.items() if said)


def disagreements(
    said: Mapping[str, Any], found: Mapping[str, Component], told_at_start: Mapping[str, Component] | None = None
) -> dict[str, tuple[Component, Component]]:
    """Components of which the doctor does not say what the server reports, and what the two say.

    A doctor that names a condition of a start says "on", and the server either on, or what the start has told of it,
    where MAY_BE has that for this condition.
    """
    differ = {}
    is_one_of_several = any(note.startswith("several nodes:") for note in said["notes"])
    for name in COMPONENT_NAMES:
        state, reason = foreseen = (said["components"][name]["state"], said["components"][name]["reason"])
        is_agreed = found[name] == foreseen
        if state == "on" and reason:
            conditions = [condition for condition in reason.split(", and ") if condition in MAY_BE]
            expected = (told_at_start or {}).get(name, ("on", ""))
            may_be = expected == ("on", "") or any(re.match(MAY_BE[one], expected[1]) for one in conditions)
            is_agreed = bool(conditions) and may_be and found[name] == expected
        behind = name in {**parts("engine"), **parts("worker")}
        if not is_agreed and is_one_of_several and behind and ON_ANOTHER_NODE in found[name][1]:
            continue
        if not is_agreed:
            differ[name] = (foreseen, found[name])
    return differ


@pytest.mark.parametrize(
    ("foreseen", "found", "is_agreed"),
    [
        (("on", ""), ("on", ""), True),
        (("on", ""), ("unneeded", "this model keeps every block's KV"), False),
        (("on", COMPONENTS["image_checkpoints"].on_if), ("unneeded", "this model keeps every block's KV"), True),
        (("on", COMPONENTS["image_checkpoints"].on_if), ("off", "prefix caching is off"), False),
        (("on", COMPONENTS["features"].on_if), ("unneeded", "this model keeps every block's KV"), False),
        (("on", "if all goes well"), ("on", ""), False),
        (("off", "a reason"), ("off", "another reason"), False),
        (("off", "a reason"), ("unneeded", "a reason"), False),
    ],
)
def test_the_comparison(foreseen: Component, found: Component, is_agreed: bool) -> None:
    """Negative control: only what a condition allows may differ, and the condition must be a known one."""
    said_of = {name: {"state": "off", "reason": "the same"} for name in COMPONENT_NAMES}
    said_of["features"] = {"state": foreseen[0], "reason": foreseen[1]}
    said = {"notes": [], "components": said_of}
    components = dict.fromkeys(COMPONENT_NAMES, ("off", "the same")) | {"features": found}
    told = {"features": found} if found != ("on", "") else {}
    assert (not disagreements(said, components, told)) is is_agreed


def compare(case: Case, tmp_path: Path, *otherwise: str) -> None:
    """otherwise: arguments with which a doctor must disagree, as it was told something else than the server."""
    model = build_cached(case.family, tmp_path / "zoo")
    paths = [case.site(tmp_path / "site")] if case.site else []
    state = {"MMCACHE_STORE": "", "XDG_STATE_HOME": str(tmp_path / "state")}
    environ = environment(paths, {**state, **case.variables})
    args = (*ARGS, *case.args)
    said = doctor_says(model, args, environ)
    with served(model, tmp_path / "log", args, environ) as server:
        found = server.components()
        assert disagreements(said, found, case.told_at_start) == {}
        lines = server.all_in_force(int("--api-server-count" in args) + 1)
        assert set(lines) == {line_of({name: found[name] for name in COMPONENT_NAMES})}
        if "MMCACHE_ADMIN_KEY" in case.variables:
            asked = httpx.get(f"{server.url}/mmcache/components", headers={"Authorization": f"Bearer {KEY}"})
            shown = asked.raise_for_status().json()["components"]
            assert {name: (one["state"], one["reason"]) for name, one in shown.items()} == found
    if otherwise:
        told_otherwise = doctor_says(model, (*args, *otherwise), environ)
        differ = disagreements(told_otherwise, found, case.told_at_start)
        assert {"features", "block_keys", "image_checkpoints"} <= set(differ), "the comparison sees nothing"


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_doctor_agrees(name: str, tmp_path: Path) -> None:
    """With one of the cases as a negative control: a doctor that is told other arguments disagrees."""
    compare(CASES[name], tmp_path, *(["--no-enable-prefix-caching"] if name == "observed" else []))


@pytest.mark.engine
@larger
@pytest.mark.parametrize("name", MORE_CASES)
def test_doctor_agrees_on_more(name: str, tmp_path: Path) -> None:
    if name == "ngram" and CHOSEN.runner == 2:
        pytest.skip("vLLM's runner V2 can't draft by ngram on the CPU: its kernel is Triton's")
    compare(MORE_CASES[name], tmp_path)


@pytest.mark.engine
@larger
def test_a_node_without_us(model: Path, tmp_path: Path) -> None:
    """The doctor can't see another node, and its notes say so."""
    port = free_port()
    said = doctor_says(model, (*ARGS, *group(port)), environment([], {}))
    with (
        second_node(model, tmp_path / "node", port, VLLM_PLUGINS="none"),
        deployed(model, tmp_path / "log", *group(port)) as head,
    ):
        found = head.components()
    assert disagreements(said, found, EVERY_BLOCK) == {}
    assert "block_keys" in disagreements({**said, "notes": []}, found, EVERY_BLOCK)


@pytest.mark.engine
@larger
def test_the_rust_frontend(model: Path, rust: dict[str, Any], tmp_path: Path) -> None:
    """No Python runs in the API server, so there is no report: its log names what is off."""
    said = doctor_says(model, ARGS, environment([], rust))
    with deployed(model, tmp_path / "log", **rust) as server:
        (listed,) = re.findall(rf"{re.escape(NO_PYTHON)}: off are (.*?);", server.log())
        assert not server.in_force()
    states = {name: (one["state"], one["reason"]) for name, one in said["components"].items()}
    off = {name for name, (state, reason) in states.items() if state in ("off", "mixed") and NO_PYTHON in reason}
    unneeded = {name for name, (state, _) in states.items() if state == "unneeded"}
    assert off == set(listed.split(", ")) - unneeded - {"observe"}, "nobody asked to observe"
    assert any(NO_PYTHON in finding["seen"] for finding in said["findings"])


@pytest.mark.engine
@larger
def test_plugins_without_mmcache(model: Path, tmp_path: Path) -> None:
    """Nothing can report, and the doctor says that all is off; `mmcache serve` does not start, for the same reason."""
    environ = environment([], {"VLLM_PLUGINS": "none"})
    said = doctor_says(model, ARGS, environ)
    assert {one["state"] for one in said["components"].values()} == {"off"}
    (reason,) = {one["reason"] for one in said["components"].values()}
    assert any(reason in finding["seen"] for finding in said["findings"])
    with deployed(model, tmp_path / "log", VLLM_PLUGINS="none") as server:
        assert not server.metrics()
        assert not server.in_force()
    command = [sys.executable, "-m", "vllm_mmcache.cli", "serve", str(model), *ARGS]
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert reason in refused.stderr


@pytest.mark.engine
@larger
def test_a_model_that_is_refused(tmp_path: Path) -> None:
    """The doctor's finding is what the server says when it ends."""
    model = build_cached("paligemma", tmp_path / "zoo")
    environ = environment([], {"MMCACHE_STORE": "", "XDG_STATE_HOME": str(tmp_path / "state")})
    (finding,) = doctor_says(model, ARGS, environ)["findings"]
    command = [sys.executable, "-m", "vllm_mmcache.cli", "serve", str(model), "--port", str(free_port()), *ARGS]
    with start(tmp_path / "log", command, environ) as process:
        assert process.wait(300) != 0
    assert finding["seen"] in (tmp_path / "log").read_text()
