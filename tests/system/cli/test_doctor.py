# SPDX-License-Identifier: Apache-2.0
"""`mmcache doctor`: what is predicted with and without a model, and what is a finding and what is not.

Reports are made in a process of their own, several in one: importing vLLM is most of what one takes.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached

from tests.support.engine_configuration import CHOSEN
from tests.system.cli.test_commands import assert_one_line, mmcache
from vllm_mmcache.cli import doctor, doctor_text
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES, parts, table

EXAMINE = """
import contextlib, json, logging, os, sys
logging.disable(logging.CRITICAL)
from vllm_mmcache.cli import doctor
from vllm_mmcache.hooking import installer
doctor.broken_packages = lambda: []  # seconds, and tested elsewhere
before, said = dict(os.environ), []
with contextlib.redirect_stdout(sys.stderr):
    for model, arguments, variables, broken in json.loads(sys.argv[1]):
        os.environ |= variables
        taken = None
        if broken:
            owner, name = installer.resolve_owner(broken)
            taken = vars(owner)[name]
            delattr(owner, name)
        said.append(doctor.examine(model, arguments, with_symbols=bool(broken)))
        assert not installer._installed
        if broken:
            setattr(owner, name, taken)
        os.environ.clear()
        os.environ |= before
print(json.dumps(said))
"""
FAMILIES = ("gemma3", "qwen3-vl", "qwen3.5", "paligemma")
BROKEN = next(member for member in table() if member.name == "lazy_media.mm_hash")


def tier(connector: str) -> str:
    return json.dumps({"kv_connector": connector, "kv_role": "kv_both"})


# name -> family of the zoo or None, vLLM's arguments, variables, a symbol that is not there
CASES: dict[str, tuple[str | None, list[str], dict[str, str], str]] = {
    "bare": (None, [], {}, ""),
    "gemma3": ("gemma3", [], {}, ""),
    "qwen3-vl": ("qwen3-vl", [], {}, ""),
    "uncached": ("qwen3-vl", ["--no-enable-prefix-caching"], {}, ""),
    "uncached, wanted": ("qwen3-vl", ["--no-enable-prefix-caching"], {"MMCACHE_FEATURES": "1"}, ""),
    "by command line": ("qwen3-vl", ["--additional-config", '{"mmcache": {"identity": false}}'], {}, ""),
    "wrong command line": ("qwen3-vl", ["--additional-config", '{"mmcache": {"identy": false}}'], {}, ""),
    "no model": ("none", [], {}, ""),
    "wrong": (None, [], {"MMCACHE_BLOCK_KEYS": "maybe"}, ""),
    "unknown": (None, [], {"MMCACHE_BLOCK_KEY": "1", "MMCACHE_OF_A_LATER_VERSION": "1"}, ""),
    "misspelt": (None, [], {"MMCACHE_REQUIRE_SALTS": "1"}, ""),
    "service": (None, [], {"MMCACHE_SERVICE_HOST": "10.0.0.11", "MMCACHE_PORT": "tcp://10.0.0.11:8000"}, ""),
    "contradiction": (None, [], {"MMCACHE_REQUIRE_SALT": "1", "MMCACHE_IDENTITY": "0"}, ""),
    "disabled": (None, [], {"MMCACHE_DISABLE": "1"}, ""),
    "left out": (None, [], {"VLLM_PLUGINS": "other", "MMCACHE_REQUIRE_SALT": "1"}, ""),
    "rust": ("gemma3", [], {"VLLM_USE_RUST_FRONTEND": "1", "MMCACHE_REQUIRE_SALT": "1"}, ""),
    "broken": (None, [], {}, BROKEN.target),
    "files": ("qwen3-vl", ["--kv-transfer-config", tier("ExampleConnector")], {}, ""),
    "offloading": ("qwen3-vl", ["--kv-offloading-size", "1", "--prefix-caching-hash-algo", "xxhash"], {}, ""),
    "seeded": (
        "qwen3-vl",
        ["--kv-offloading-size", "1", "--prefix-caching-hash-algo", "xxhash"],
        {"PYTHONHASHSEED": "7", "MMCACHE_IDENTITY": "0"},
        "",
    ),
    "hybrid": ("qwen3.5", ["--kv-offloading-size", "1"], {}, ""),
    "sliding": ("gemma3", ["--kv-offloading-size", "1"], {}, ""),
    "open store": (None, [], {"MMCACHE_STORE": "/a redis://:secret@10.0.0.1"}, ""),
    "trusted store": (
        "qwen3-vl",
        ["--additional-config", '{"mmcache": {"store_trusted_network": true}}'],
        {"MMCACHE_STORE": "redis://10.0.0.1"},
        "",
    ),
    "store without a name": (None, [], {"MMCACHE_STORE": "redis+sentinel://10.0.0.1"}, ""),
    "another renderer": (
        "qwen3-vl",
        ["--tokenizer-mode", "deepseek_v32", "--prefix-caching-hash-algo", "xxhash_cbor"],
        {},
        "",
    ),
    "pooling": ("qwen3-vl", ["--runner", "pooling", "--pooler-config.seq_pooling_type", "CLS"], {}, ""),
    "refused": ("paligemma", [], {}, ""),
    "refused, allowed": ("paligemma", [], {"MMCACHE_ALLOW_CAUSAL_IMAGES": "1"}, ""),
    "two nodes": ("qwen3-vl", ["--data-parallel-size", "2", "--data-parallel-size-local", "1"], {}, ""),
    "hooks broken": (None, [], {}, "vllm.v1.worker.worker_base:WorkerBase.__init__"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, str | None]:
    zoo = tmp_path_factory.mktemp("zoo")
    built = {family: str(build_cached(family, zoo)) for family in FAMILIES}
    return {None: None, "none": str(zoo / "none")} | dict(built)


@pytest.fixture(scope="module")
def reports(models: dict[str | None, str | None]) -> dict[str, dict[str, Any]]:
    cases = [(models[family], arguments, variables, broken) for family, arguments, variables, broken in CASES.values()]
    done = subprocess.run(
        [sys.executable, "-c", EXAMINE, json.dumps(cases)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def states(report: dict[str, Any]) -> dict[str, str]:
    return {component: said["state"] for component, said in report["components"].items()}


def findings(report: dict[str, Any]) -> dict[str, str]:
    assert all(finding["cure"] for finding in report["findings"])
    return {finding["where"]: finding["seen"] for finding in report["findings"]}


@pytest.mark.process
def test_models_differ_where_they_should(reports: dict[str, dict[str, Any]]) -> None:
    both_ways, causal = states(reports["gemma3"]), states(reports["qwen3-vl"])
    assert set(both_ways) == set(COMPONENT_NAMES)
    assert {component for component in COMPONENT_NAMES if both_ways[component] != causal[component]} == {"image_spans"}
    assert (both_ways["image_spans"], causal["image_spans"]) == ("on", "unneeded")
    assert findings(reports["gemma3"]) == findings(reports["qwen3-vl"]) == {}
    for report in (reports["gemma3"], reports["qwen3-vl"]):
        assert report["engine"]["runner"] == CHOSEN.runner
        assert report["engine"]["scheduling"] == ("async" if CHOSEN.is_async else "sync")
        assert f"model runner V{CHOSEN.runner}" in report["engine"]["words"]


@pytest.mark.process
def test_without_a_model(
    reports: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    report = reports["bare"]
    assert (report["engine"]["runner"], report["engine"]["scheduling"]) == (None, None)
    assert set(states(report)) == set(COMPONENT_NAMES)
    assert states(report)["image_spans"] == "on"  # not known to be unneeded
    assert findings(report) == {}
    more = "(`mmcache doctor MODEL` knows more)"
    for name, is_said in (("bare", True), ("gemma3", False)):
        doctor_text.show(reports[name], with_settings=False)
        assert (more in capsys.readouterr().out) is is_said


@pytest.mark.process
def test_off_for_a_reason_is_no_finding_unless_it_was_asked_for(reports: dict[str, dict[str, Any]]) -> None:
    for name in ("uncached", "uncached, wanted"):
        assert reports[name]["components"]["features"] == {"state": "off", "reason": "prefix caching is off"}
    assert findings(reports["uncached"]) == {}
    assert findings(reports["uncached, wanted"]) == {
        "MMCACHE_FEATURES": "set, but features will be off: prefix caching is off"
    }


@pytest.mark.process
def test_the_command_line_counts(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["by command line"]
    assert report["components"]["identity"]["state"] == "off"
    assert findings(report) == {}
    value = next(row["value"] for row in report["settings"] if row["variable"] == "MMCACHE_IDENTITY")
    assert value is False
    assert "additional-config mmcache.identy" in findings(reports["wrong command line"])["settings"]


@pytest.mark.process
def test_wrong_and_contradicting_settings(reports: dict[str, dict[str, Any]]) -> None:
    assert "MMCACHE_BLOCK_KEYS" in findings(reports["wrong"])["settings"]
    seen = findings(reports["contradiction"])["settings"]
    assert "MMCACHE_REQUIRE_SALT" in seen
    assert "MMCACHE_IDENTITY" in seen
    assert reports["wrong"]["components"] == reports["contradiction"]["components"] == {}


@pytest.mark.process
def test_unknown_variables(reports: dict[str, dict[str, Any]]) -> None:
    """Each is a finding of its own, with the name that may be meant; what Kubernetes sets for a Service is none."""
    cures = {finding["where"]: finding["cure"] for finding in reports["unknown"]["findings"]}
    assert cures == {
        "MMCACHE_BLOCK_KEY": "did you mean MMCACHE_BLOCK_KEYS? Else unset it",
        "MMCACHE_OF_A_LATER_VERSION": "unset it",
    }
    assert "not protected" in findings(reports["misspelt"])["MMCACHE_REQUIRE_SALTS"]
    assert not any("not protected" in seen for seen in findings(reports["unknown"]).values())
    assert findings(reports["service"]) == {}
    for name in ("unknown", "misspelt", "service"):
        assert reports[name]["components"] == reports["bare"]["components"]


@pytest.mark.process
def test_a_store_that_others_can_reach(reports: dict[str, dict[str, Any]]) -> None:
    ((where, seen),) = findings(reports["open store"]).items()
    assert where == "MMCACHE_STORE"
    assert seen.startswith("redis://***@10.0.0.1 has no TLS, and nothing encrypts")
    assert "MMCACHE_STORE_TRUSTED_NETWORK" in reports["open store"]["findings"][0]["cure"]
    assert findings(reports["trusted store"]) == {}
    assert "redis+sentinel://HOST:26379/NAME" in findings(reports["store without a name"])["settings"]


@pytest.mark.process
def test_a_model_that_cannot_be_resolved(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["no model"]
    ((where, seen),) = findings(report).items()
    assert where.endswith("/none")
    assert "\n" not in seen
    assert where.removeprefix("model ") in seen
    assert "validation error" not in seen  # vLLM's sentence, not what pydantic puts around it
    assert report["components"] == {}, "nothing is said to be on for a model that was not read"


@pytest.mark.process
def test_nothing_of_ours_runs(reports: dict[str, dict[str, Any]]) -> None:
    for name, reason in (("disabled", "MMCACHE_DISABLE is set"), ("left out", "VLLM_PLUGINS=other leaves mmcache out")):
        assert set(states(reports[name]).values()) == {"off"}
        assert {said["reason"] for said in reports[name]["components"].values()} == {reason}
    assert findings(reports["disabled"]) == {}
    assert "require_salt is not kept" in findings(reports["left out"])["VLLM_PLUGINS"]


@pytest.mark.process
def test_the_rust_frontend(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["rust"]
    assert set(findings(report)) == {"VLLM_USE_RUST_FRONTEND", "MMCACHE_REQUIRE_SALT"}
    here = states(report)
    assert here["identity"] == here["lazy_media"] == here["image_extraction"] == "off"
    assert here["image_spans"] == "mixed"  # it has a part in the engine
    assert {component: state for component, state in here.items() if component not in parts("api")} == {
        component: state for component, state in states(reports["gemma3"]).items() if component not in parts("api")
    }


@pytest.mark.process
def test_a_broken_symbol_is_a_finding(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["broken"]
    ((where, seen),) = findings(report).items()
    assert where == "symbols of lazy_media"
    assert BROKEN.target in seen
    need_it = {"lazy_media", "image_extraction", "lazy_processing"}
    assert {component for component in need_it if states(report)[component] == "off"} == need_it
    others = {component: state for component, state in states(report).items() if component not in need_it}
    assert others == {component: state for component, state in states(reports["bare"]).items() if component in others}
    rows = {row["name"]: row["misfit"] for row in report["symbols"]}
    assert set(rows) == {member.name for member in table()}
    assert {name for name, misfit in rows.items() if misfit} == {BROKEN.name}


@pytest.mark.process
def test_without_the_hooks_nothing_is_on(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["hooks broken"]
    assert set(states(report).values()) == {"off"}
    assert set(findings(report)) == {"symbols of settings"}


@pytest.mark.process
def test_what_a_kv_connector_cannot_do(reports: dict[str, dict[str, Any]]) -> None:
    seen = {name: [f["seen"] for f in reports[name]["findings"]] for name in ("files", "offloading", "seeded")}
    assert {f["where"] for name in seen for f in reports[name]["findings"]} == {"--kv-transfer-config"}
    (salts,) = seen["files"]
    assert "ExampleConnector know no cache_salt" in salts
    start, seed = seen["offloading"]
    assert "OffloadingConnector" in start
    assert "no engine starts" in start
    assert "PYTHONHASHSEED" in seed
    start, names = seen["seeded"]
    assert "no engine starts" in start
    assert "uuid" in names


@pytest.mark.process
def test_checkpoints_beside_a_kv_connector(reports: dict[str, dict[str, Any]]) -> None:
    hybrid, sliding = (reports[name]["components"]["image_checkpoints"] for name in ("hybrid", "sliding"))
    assert hybrid["state"] == "off"
    assert "Mamba state" in hybrid["reason"]
    if CHOSEN.runner == 1:
        assert sliding["state"] == "on"
    else:
        assert "model runner V2" in sliding["reason"]


@pytest.mark.process
def test_what_a_start_finds_out_is_foreseen(reports: dict[str, dict[str, Any]]) -> None:
    """The renderer, the layout of block keys, and the prefix caching that `mmcache serve` switches on."""
    said = reports["another renderer"]["components"]
    assert said["image_extraction"]["reason"] == "not shown to be right with the renderer DeepseekV32Renderer"
    assert said["block_keys"]["state"] == "off"
    assert said["block_keys"]["reason"] == reports["another renderer"]["block_keys"]["xxhash_cbor"]["why"]
    assert states(reports["qwen3-vl"])["image_extraction"] == states(reports["qwen3-vl"])["block_keys"] == "on"
    assert states(reports["pooling"])["block_keys"] == "on", "vLLM's own default is none for this pooling"


@pytest.mark.process
def test_what_only_a_start_finds_out_is_said(reports: dict[str, dict[str, Any]]) -> None:
    for family, on in (("gemma3", {"features", "image_checkpoints"}), ("hybrid", {"features"})):
        components = reports[family]["components"]
        assert {name for name, one in components.items() if one["reason"].startswith("if ")} == on
        assert all(components[name]["state"] == "on" for name in on)
    assert [note for note in reports["two nodes"]["notes"] if note.startswith("several nodes:")]
    assert ["MMCACHE_AUDIT=0.001" in note for note in reports["qwen3-vl"]["notes"]] == [True]
    assert reports["hybrid"]["notes"] == [], "which the audit does not look at"


@pytest.mark.process
def test_a_model_that_no_server_starts_with(reports: dict[str, dict[str, Any]]) -> None:
    ((where, seen),) = findings(reports["refused"]).items()
    assert "paligemma" in where
    assert "on the CPU answers would be wrong" in seen
    assert findings(reports["refused, allowed"]) == {}


@pytest.mark.process
def test_one_screen(models: dict[str | None, str | None]) -> None:
    outcome = mmcache("doctor", models["gemma3"] or "", COLUMNS="100")
    lines = outcome.stdout.splitlines()
    assert outcome.returncode == (0 if "no findings" in lines else 1), outcome.stderr
    assert len(lines) <= 30 + 2 * outcome.stdout.count("finding in ")
    assert max(map(len, lines)) <= 100
    words = [line.split() for line in lines]
    assert [component for component in COMPONENT_NAMES if any(line[:1] == [component] for line in words)] == list(
        COMPONENT_NAMES
    )
    assert any(line[:2] == ["image_spans", "on"] for line in words)
    assert "Traceback" not in outcome.stderr


@pytest.mark.process
def test_json_has_everything(models: dict[str | None, str | None]) -> None:
    outcome = mmcache("doctor", models["qwen3-vl"] or "", "--max-model-len", "512", "--json")  # ours after MODEL, too
    facts = json.loads(outcome.stdout)
    assert outcome.returncode == (1 if facts["findings"] else 0)
    assert facts["vllm"]["version"].startswith("0.3")
    assert set(facts["components"]) == set(COMPONENT_NAMES)
    assert {row["group"] for row in facts["symbols"]} >= set(COMPONENT_NAMES)
    assert set(facts["block_keys"]) == {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}
    assert {row["variable"] for row in facts["settings"]} >= {"MMCACHE_DISABLE", "MMCACHE_BLOCK_KEYS"}
    assert {"torch", "transformers"} <= set(facts["packages"])


@pytest.mark.process
def test_arguments_that_vllm_does_not_take() -> None:
    assert_one_line(mmcache("doctor", "some/model", "--no-such-vllm-option", "1"), "--no-such-vllm-option")


def test_ray_is_a_note() -> None:
    assert doctor.notes(["--tensor-parallel-size", "2"]) == []
    for said in (["--distributed-executor-backend", "ray"], ["--data_parallel_backend=ray"]):
        (note,) = doctor.notes(said)
        assert "every node" in note
