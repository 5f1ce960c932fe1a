# SPDX-License-Identifier: Apache-2.0
"""What is proven of which items: a failed item, a component that was not seen at work, an engine of another place."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.prove_zoo.items import ZooHow, families_of
from mmcache_tools.zoo import architecture_of
from rich.console import Console

from vllm_mmcache import __version__
from vllm_mmcache.base import distributions
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.cli import preflight
from vllm_mmcache.cli import prove as verb
from vllm_mmcache.lifecycle import user_proofs
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS
from vllm_mmcache.lifecycle.user_proofs import ProofScope
from vllm_mmcache.prove import arguments, items, look, proving
from vllm_mmcache.prove.items import Item, OwnHow
from vllm_mmcache.prove.runs import Runs

PLACE = ProofScope("0.33.0", "cuda", 2, "async", "2.14.0", __version__, "Some GPU", architecture_of("qwen3-vl"), 1, 1)
OF_USE = ["block_keys", "metrics", "features"]

Said = dict[str, Any]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Item]]:
    """Items that pass without an engine, but for what `change` makes of them; returns those that were run."""

    def start(change: Callable[[Item, Said], Any] = lambda item, said: None, place: ProofScope = PLACE) -> list[Item]:
        ran: list[Item] = []

        def run(item: Item, how: Any, stock: Any, left_s: float) -> Said:
            ran.append(item)
            said: Said = {"state": "passed", "reason": "9 checks", "engine": {}, "place": asdict(place)}
            said |= {"proven": ["metrics", "image_spans"], "of_use": OF_USE}
            said["checks"] = {f"use of {component}": {"state": "passed"} for component in item.components}
            change(item, said)
            return said

        monkeypatch.setattr(items, "run", run)
        return ran

    return start


def prove(components: tuple[str, ...] = ENGINE_COMPONENTS, compiled: bool = False) -> proving.Verdict:
    return proving.prove(Runs(ZooHow()), "qwen3-vl", "zoo family qwen3-vl", components, compiled=compiled)


def fail(*components: str, together: bool = False) -> Callable[[Item, Said], Any]:
    """These components' own items fail, or all together."""

    def change(item: Item, said: Said) -> None:
        if item.components and (
            item.together if together else not item.together and set(item.components) & set(components)
        ):
            said |= {"state": "failed", "reason": "same_again: log-probabilities differ by 2.31e+00 > 1e-03"}

    return change


def test_all_that_passed_is_kept(started: Callable[..., list[Item]]) -> None:
    ran = started()
    verdict = prove(compiled=True)
    assert [(item.components, item.compiled, item.together) for item in ran] == [
        ((), False, False),
        *(((component,), False, False) for component in ENGINE_COMPONENTS if component in OF_USE),
        ((), True, False),
        (ENGINE_COMPONENTS, True, True),
    ]
    assert user_proofs.proven_components(PLACE) == set(ENGINE_COMPONENTS)
    assert verdict.components["image_spans"] == ("proven", "together with the others; this model has no use for it")
    assert proving.exit_code([verdict]) == 0
    (line,) = proving.sentences(verdict)
    assert line.startswith(f"On from the next start, for {PLACE.architecture} on Some GPU: block_keys, image_spans, ")
    for other in (replace(PLACE, vllm="0.33.1"), replace(PLACE, device="Other GPU"), replace(PLACE, runner=1)):
        assert user_proofs.proven_components(other) == frozenset()


def test_a_component_that_fails_stays_off_and_says_what_differed(started: Callable[..., list[Item]]) -> None:
    ran = started()
    prove()
    ran = started(fail("features", "metrics"))
    verdict = prove()
    assert ran[-1].components == tuple(
        component for component in ENGINE_COMPONENTS if component not in ("features", "metrics")
    )
    assert user_proofs.proven_components(PLACE) == set(ENGINE_COMPONENTS) - {"features", "metrics"}, (
        "what was proven is taken back"
    )
    assert proving.exit_code([verdict]) == 1
    said = proving.sentences(verdict)
    assert any(
        line.startswith("features failed, and stays off for") and "same_again: log-probabilities differ by 2.31" in line
        for line in said
    )
    assert any("metrics failed, though" in line and "MMCACHE_METRICS=0 switches it off" in line for line in said)


def test_one_component_is_tried_beside_those_that_are_on_by_default(started: Callable[..., list[Item]]) -> None:
    ran = started()
    verdict = prove(("features",))
    assert [item.components for item in ran] == [(), ("features",), ("image_spans", "features", "metrics")]
    assert list(verdict.components) == ["features"]
    assert user_proofs.proven_components(PLACE) == {"features"}


def test_what_fails_together_proves_nothing(started: Callable[..., list[Item]]) -> None:
    started(fail(together=True))
    verdict = prove()
    assert user_proofs.read() == ([], [])
    assert verdict.components["features"] == (
        "failed",
        "with the other components: same_again: log-probabilities differ by 2.31e+00 > 1e-03",
    )
    assert proving.exit_code([verdict]) == 1


def test_a_component_must_be_seen_at_work_and_at_one_place(started: Callable[..., list[Item]]) -> None:
    def idle(item: Item, said: Said) -> None:
        if "features" in item.components:
            said["checks"]["use of features"] = {"state": "not checked", "reason": "nothing to see"}

    started(idle)
    verdict = prove()
    assert verdict.components["features"] == ("not checked", "it was not seen at work: nothing to see")
    assert "features" not in user_proofs.proven_components(PLACE)
    assert "block_keys" in user_proofs.proven_components(PLACE)

    def elsewhere(item: Item, said: Said) -> None:
        if item.components == ("block_keys",):
            said["place"] = asdict(replace(PLACE, scheduling="sync"))

    started(elsewhere)
    state, why = prove().components["block_keys"]
    assert (state, "its engine was another than stock's" in why) == ("not checked", True)


def test_what_stock_does_not_run_is_not_checked(started: Callable[..., list[Item]]) -> None:
    def refuse(item: Item, said: Said) -> None:
        said.clear()
        said |= {"state": "not checked", "reason": "RuntimeError: out of memory"}

    ran = started(refuse)
    verdict = prove()
    assert len(ran) == 1
    assert proving.exit_code([verdict]) == 2
    (line,) = proving.sentences(verdict)
    assert line.startswith("Could not be checked for qwen3-vl: block_keys, ")
    assert "stock vLLM does not run this: RuntimeError: out of memory" in line


def test_where_only_one_component_makes_images_right_the_others_are_tried_with_it(
    started: Callable[..., list[Item]],
) -> None:
    """On the CPU, models whose images attend both ways."""

    def both_ways(item: Item, said: Said) -> None:
        said["of_use"] = ["image_spans", "metrics"]

    ran = started(both_ways, replace(PLACE, platform="cpu"))
    prove(("metrics",))
    assert [item.components for item in ran][1] == ("image_spans", "metrics")
    ran = started(both_ways)
    prove(("metrics",))
    assert [item.components for item in ran][1] == ("metrics",)


def test_ctrl_c_keeps_what_has_passed(
    started: Callable[..., list[Item]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(item: Item, said: Said) -> None:
        if item.subject == "gemma3":
            raise KeyboardInterrupt

    started(stop)
    monkeypatch.setattr(look, "look", lambda *given: look.Target("0.33.0", "cuda", "Some GPU", (), False, ""))
    code = verb.run(None, [], False, ENGINE_COMPONENTS, ("qwen3-vl", "gemma3"), False, None, False)
    assert code == 130
    assert user_proofs.proven_components(PLACE) == set(ENGINE_COMPONENTS)
    said = capsys.readouterr().out
    assert re.search(r"\[2/6\] qwen3-vl, block_keys: passed: 9 checks \(\d+ s\)", said)
    assert "stopped; kept is what was found for: qwen3-vl" in said


@pytest.mark.parametrize("left", ["control: a spoiled KV cache is seen", "features is on", "same_again"])
def test_an_item_without_its_controls_proves_nothing(left: str) -> None:
    """Where a wrong answer would not have been seen, or the component was not in force, right answers say nothing."""
    names = ["control: a spoiled KV cache is seen", "features is on", "same_again", "two_images"]
    rows = [{"check": name, "state": "passed", "reason": "", "inexact": False} for name in names]
    item = Item("qwen3-vl", ("features",), None)
    assert items.judge(item, {"rows": rows, "engine": {}}, None)["state"] == "passed"
    rows[names.index(left)] |= {"state": "not checked", "reason": "not shown"}
    judged = items.judge(item, {"rows": rows, "engine": {}}, None)
    assert judged["state"] == ("passed" if left == "same_again" else "not checked")
    assert left in judged["reason"]


def test_the_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "SOME")
    monkeypatch.setenv("MMCACHE_STORE", "/somewhere")
    monkeypatch.setenv("MMCACHE_DISABLE", "1")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    item = Item("gemma3", ("features",), None)
    environ = ZooHow().environment(item)
    assert environ["VLLM_ATTENTION_BACKEND"] == "SOME"
    assert [environ[f"MMCACHE_{component}"] for component in ("FEATURES", "METRICS")] == ["1", "0"]
    gone = {"MMCACHE_STORE", "MMCACHE_DISABLE", "PYTHONOPTIMIZE", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"}
    assert not gone & set(environ)
    assert environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert "HF_HUB_OFFLINE" not in OwnHow(model="some/model").environment(item), "its files may not be here yet"
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert ZooHow().environment(item)["VLLM_PLUGINS"] == "another,mmcache"
    assert ZooHow().environment(replace(item, components=()))["MMCACHE_DISABLE"] == "1"


def test_vllms_arguments() -> None:
    """Its own parser reads them; what is not said stays unsaid; what an item can't take is named."""
    pytest.importorskip("vllm")
    found = arguments.given(["--no-enforce-eager", "--max_model_len", "2k", "-tp", "2", "--seed", "7"])
    assert found == {"enforce_eager": False, "max_model_len": 2000, "tensor_parallel_size": 2, "seed": 7}
    kept, (line,) = arguments.taken(found, ZooHow.fixed_arguments)
    assert kept == {"enforce_eager": False, "tensor_parallel_size": 2}
    assert line.startswith("left out of vLLM's arguments: --max-model-len, --seed; the zoo's model and")
    assert "max_model_len" in arguments.taken(found)[0]
    more = arguments.given(["--additional-config", json.dumps({"mmcache": {"features": True}, "other": 1})])
    kept, (line,) = arguments.taken(more)
    assert (kept, "each item switches components itself" in line) == ({"additional_config": {"other": 1}}, True)
    for wrong, words in (
        (["--port", "80"], "unrecognized arguments: --port 80: give those of its engine"),
        (["--block-size", "many"], "invalid"),
        (["--model", "x"], "name the model first"),
    ):
        with pytest.raises(EnvironmentProblem, match=words):
            arguments.given(wrong)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0rc1", "0.33.1.dev2+gabc", "0.34.0", "dev"])
def test_a_vllm_where_nothing_would_be_on(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "vllm_version", lambda: version)
    monkeypatch.delenv(items.UNTESTED, raising=False)
    with pytest.raises(EnvironmentProblem, match=re.escape(f"vLLM {version} is outside")):
        look.see("", [])


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.1"])
def test_a_vllm_that_can_be_proven(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "vllm_version", lambda: version)
    monkeypatch.delenv(items.UNTESTED, raising=False)
    assert look.see("", []).vllm == version


def test_without_the_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models can't be checked, and the error names both ways on; a model of one's own can."""
    monkeypatch.setattr(distributions, "are_here", lambda module=distributions.ZOO: False)
    monkeypatch.setattr(preflight, "check_vllm", lambda: None)
    needed = "needs vllm-mmcache-tools, which is not installed: pip install "
    for model in (None, "/m"):
        with pytest.raises(EnvironmentProblem, match=rf"{needed}.*; .* mmcache prove {model or 'MODEL'} --own$"):
            verb.check_choice(model, False, None, None)
    assert verb.check_choice("/m", True, ["metrics"], None) == (("metrics",), ())
    with pytest.raises(EnvironmentProblem, match="can't be read"):
        look.architecture_in("/no/such/model", {})
    with pytest.raises(EnvironmentProblem, match=needed):
        verb.subjects_of("/m", False, (), "Gemma3ForConditionalGeneration")


def test_the_zoos_family_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma3ForConditionalGeneration"]}')
    assert look.architecture_in(str(tmp_path), {}) == "Gemma3ForConditionalGeneration"
    assert families_of("Gemma3ForConditionalGeneration") == ["gemma3"]
    assert families_of("Gemma4ForConditionalGeneration") == ["gemma4", "gemma4-causal"]
    with pytest.raises(EnvironmentProblem, match="mmcache prove /m --own"):
        verb.subjects_of("/m", False, (), "LlavaForConditionalGeneration")
    for text in ("", "[]", "{}", '{"architectures": []}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(EnvironmentProblem, match="can't be read"):
            look.architecture_in(str(tmp_path), {})


def test_the_table_and_show(started: Callable[..., list[Item]], capsys: pytest.CaptureFixture[str]) -> None:
    started(fail("features"))
    verb.report(Console(width=200), [prove()])
    said = capsys.readouterr().out
    assert "features" in said
    assert "Kept in " in said
    assert verb.list_proofs(as_json=False) == 0
    said = capsys.readouterr().out
    components = "block_keys, image_spans, resumed_images, image_checkpoints, inner_checkpoints, metrics"
    assert said.startswith(f"1. {components}: vLLM 0.33.0, ")
    # Of vLLM, or with that version of it of torch.
    assert re.search(r"not used here: it is for (vllm 0\.33\.0|torch 2\.14\.0), installed is", said)
    user_proofs.path().write_text("rubbish")
    assert verb.list_proofs(as_json=False) == 0
    assert "is ignored: it is not JSON" in capsys.readouterr().out
