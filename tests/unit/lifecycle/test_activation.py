# SPDX-License-Identifier: Apache-2.0
"""Which components are on: by setting, by configuration, by where the component was tested, by what fits."""

import copy
import logging
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface

from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.base import config_payload, settings, status
from vllm_mmcache.base.errors import HookError
from vllm_mmcache.base.role import ROLES
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle import activation, config_rules, tested_engines, user_proofs
from vllm_mmcache.lifecycle.activation import IF_TRIED
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES, COMPONENTS, parts
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS, Engine, Row, Served, engine_here

pytestmark = pytest.mark.usefixtures("nothing_stays_installed", "no_role")


@pytest.fixture(scope="module")
def configurations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """vLLM's own for two models: images of one attend as text does, of the other both ways."""
    from vllm.engine.arg_utils import EngineArgs

    root = tmp_path_factory.mktemp("zoo")
    return {
        family: EngineArgs(str(build_cached(family, root)), dtype="float32", enforce_eager=True).create_engine_config()
        for family in ("qwen3-vl", "gemma3")
    }


def decide(
    component: str, configurations: dict[str, Any], family: str = "gemma3", engine: Served | None = None
) -> State:
    vllm_config = configurations[family]
    engine = engine or engine_here(vllm_config)
    own, _ = activation.own_proofs(engine, vllm_config)
    return activation.decide(component, engine, vllm_config, own)


def chosen(values: dict[str, Any]) -> settings.Settings:
    return settings.Settings(**values)


def test_every_component_and_seam_belongs_together() -> None:
    assert all(name in parts(role) for name, component in COMPONENTS.items() for role in component.on_install)
    assert set(COMPONENT_NAMES) <= set(settings.Settings.model_fields)
    assert all(
        COMPONENT_NAMES.index(one.needs) < COMPONENT_NAMES.index(component)
        for component, one in COMPONENTS.items()
        if one.needs
    )
    assert set(COMPONENT_NAMES) == {component for role in ROLES for component in parts(role)}


@pytest.mark.parametrize("component", COMPONENT_NAMES)
def test_settings_decide_first(component: str, configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", chosen({component: False}))
    asked = (
        f"MMCACHE_{component.upper()}=1 switches it on"
        if COMPONENTS[component].opt_in
        else f"switched off by the setting {component}"
    )
    assert decide(component, configurations) == State("off", asked)


@pytest.mark.parametrize("component", ENGINE_COMPONENTS)
def test_proof_decides_where_no_setting_does(
    component: str, configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_current", chosen({"trial_s": 0}))
    monkeypatch.setattr(tested_engines, "TABLE", [])
    if component == "inner_checkpoints" or (component == "resumed_images" and CHOSEN.runner == 2):
        assert decide(component, configurations).state == "unneeded"
        return
    off = decide(component, configurations)
    assert off.state == "off"
    assert f"MMCACHE_{component.upper()}=1 switches it on" in off.reason
    monkeypatch.setattr(settings, "_current", chosen({component: True}))
    assert decide(component, configurations) == ON
    monkeypatch.setattr(settings, "_current", settings.Settings(unproven=True))
    assert decide(component, configurations) == ON
    monkeypatch.setattr(settings, "_current", chosen({"unproven": True, component: False}))
    assert decide(component, configurations).state == "off"


def test_the_runner_is_part_of_the_proof(configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", chosen({"trial_s": 0}))
    here = engine_here(configurations["gemma3"])
    monkeypatch.setattr(tested_engines, "TABLE", [Row(here, ENGINE_COMPONENTS, "a test")])
    assert decide("features", configurations) == ON
    other = replace(here, scheduling="sync" if here.scheduling == "async" else "async")
    assert "not yet proven" in decide("features", configurations, engine=other).reason


def test_a_proof_of_the_users_own_counts(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the engine, device and versions that it is of, for the same architecture, and nowhere else."""
    monkeypatch.setattr(settings, "_current", chosen({"trial_s": 0}))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tested_engines, "TABLE", [])
    assert decide("features", configurations).state == "off"
    place = user_proofs.ProofScope.of(configurations["gemma3"])
    user_proofs.add(place, ["features"], "a test", [])
    assert decide("features", configurations) == ON
    assert decide("block_keys", configurations).state == "off"
    assert decide("features", configurations, "qwen3-vl").state == "off"
    user_proofs.forget()
    user_proofs.add(replace(place, device="another"), ["features"], "a test", [])
    assert decide("features", configurations).state == "off"


def test_what_is_not_proven_is_tried(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is prepared as if it were on; what a proof or a setting decides is not tried."""
    install(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tested_engines, "TABLE", [])
    config = configurations["gemma3"]
    assert decide("features", configurations) == ON
    said = activation.predict(config)
    assert said["block_keys"] == State("on", IF_TRIED)
    assert said["features"] == State("on", f"{COMPONENTS['features'].on_if}, and {IF_TRIED}")
    assert set(activation.on_trial(config)) == set(ENGINE_COMPONENTS)
    user_proofs.add(user_proofs.ProofScope.of(config), ["features"], "a test", [])
    assert set(activation.on_trial(config)) == set(ENGINE_COMPONENTS) - {"features"}
    monkeypatch.setattr(settings, "_current", chosen({"block_keys": True, "metrics": False}))
    assert not {"block_keys", "metrics", "features"} & set(activation.on_trial(config))
    monkeypatch.setattr(settings, "_current", chosen({"trial_all": True, "block_keys": True}))
    assert set(activation.on_trial(config)) == set(ENGINE_COMPONENTS)
    monkeypatch.setattr(settings, "_current", chosen({"unproven": True}))
    assert activation.on_trial(config) == []


def test_an_engine_that_can_not_be_tried_by_itself(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tested_engines, "TABLE", [])
    config = copy.copy(configurations["gemma3"])
    config.kv_transfer_config = object()
    reason = activation.decide("features", engine_here(config), config).reason
    assert "a connector would take its requests to other engines" in reason
    assert "MMCACHE_FEATURES=1 switches it on" in reason
    assert activation.on_trial(config) == []


def test_what_is_ignored_of_the_users_proofs_is_said(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING and record.name.startswith("vllm.mmcache")

    def said() -> str:
        caplog.clear()
        activation.activate("api", configurations["gemma3"])
        return " ".join(record.getMessage() for record in caplog.records if is_warning(record))

    here = engine_here(configurations["gemma3"])
    engine = Engine(here.vllm, here.platform, here.runner, here.scheduling)
    monkeypatch.setattr(tested_engines, "TABLE", [Row(engine, ENGINE_COMPONENTS, "a test")])
    assert said() == ""
    place = user_proofs.ProofScope.of(configurations["gemma3"])
    user_proofs.add(replace(place, vllm="0.31.0"), ["features"], "a test", [])
    assert said() == "", "a proof is not asked for where the component is on anyway"
    monkeypatch.setattr(tested_engines, "TABLE", [])
    assert "a proof of features for vLLM 0.31.0 does not hold for vLLM" in said()
    user_proofs.path().write_text("{")
    assert "proofs.json is ignored: it is not JSON" in said()


def test_the_users_proofs_are_read_once(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(settings, "_current", chosen({"trial_s": 0}))
    install(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tested_engines, "TABLE", [])
    user_proofs.add(user_proofs.ProofScope.of(configurations["gemma3"]), ["features", "metrics"], "a test", [])
    reads, read = [], user_proofs.read
    monkeypatch.setattr(user_proofs, "read", lambda: reads.append("read") or read())
    for role in ROLES:
        activation.activate(role, configurations["gemma3"])
        assert reads.pop() == "read"
        assert not reads
    assert status.of("worker")["features"] == ON == status.of("api")["metrics"]
    assert activation.predict(configurations["gemma3"])["features"] == State("on", COMPONENTS["features"].on_if)
    assert reads == ["read"]


def test_the_configuration_says_what_a_component_can_do(configurations: dict[str, Any]) -> None:
    assert decide("image_spans", configurations, "gemma3") == ON
    assert decide("image_spans", configurations, "qwen3-vl").state == "unneeded"


def test_a_deployment_without_images(configurations: dict[str, Any]) -> None:
    """The components that are about images alone have nothing to do; the others are as with images."""
    with_images = configurations["gemma3"]
    without = copy.deepcopy(with_images)
    assert without.model_config.multimodal_config.get_limit_per_prompt("image") > 0
    without.model_config.multimodal_config.language_model_only = True
    alone = {
        "resumed_images",
        "image_checkpoints",
        "inner_checkpoints",
        "features",
        "lazy_media",
        "image_extraction",
        "lazy_processing",
    }
    for component in COMPONENT_NAMES:
        found = config_rules.state_in(COMPONENTS[component], without)
        if component in alone:
            assert found == State("unneeded", "this deployment takes no images")
            assert found != config_rules.state_in(COMPONENTS[component], with_images)
        else:
            assert found == config_rules.state_in(COMPONENTS[component], with_images)


def test_a_component_steps_aside_where_vllm_does_the_same(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The split of a vLLM that stops at the last multimodal feature by itself (56818) reads where that ends."""
    from vllm.v1.core.sched.scheduler import Scheduler

    assert decide("image_checkpoints", configurations) == ON

    def _mamba_block_aligned_split(self: Any, request: Any, num_new_tokens: int) -> int:
        return min(num_new_tokens, request.mm_final_end)

    monkeypatch.setattr(Scheduler, "_mamba_block_aligned_split", _mamba_block_aligned_split)
    found = decide("image_checkpoints", configurations)
    assert found.state == "unneeded"
    assert found.reason.startswith("vLLM has its own")


@pytest.mark.parametrize("component", [name for name, one in COMPONENTS.items() if one.superseded_by])
def test_a_component_steps_aside(
    component: str, configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This vLLM does not do it itself; where all the symbols are there, the component steps aside and names them."""
    for symbol in COMPONENTS[component].superseded_by:
        assert decide(component, configurations) == ON  # with a part of them, too
        module, _, path = symbol.partition(":")
        monkeypatch.setattr(".".join([module, path]), print, raising=False)
    assert decide(component, configurations) == State(
        "unneeded", f"vLLM has its own: {', '.join(COMPONENTS[component].superseded_by)}"
    )


def test_settings_travel_beside_the_configuration(configurations: dict[str, Any]) -> None:
    """Pickled and copied, also to processes without us; what it says, and vLLM's hash of it, stay as they are."""
    vllm_config = copy.deepcopy(configurations["qwen3-vl"])
    vllm_config.additional_config = {"of": "another plugin"}
    before = vllm_config.compute_hash()
    assert config_payload.carried(vllm_config) is None
    assert "has no mmcache" in config_rules.why_absent("worker", vllm_config)
    config_payload.carry(vllm_config, settings.load_settings({"features": False}))
    for one in (pickle.loads(pickle.dumps(vllm_config)), copy.deepcopy(vllm_config)):
        assert config_payload.carried(one) == {"features": False}
        assert one.additional_config == {"of": "another plugin"}
        assert one.compute_hash() == before
        assert config_rules.why_absent("worker", one) == ""


def install(monkeypatch: pytest.MonkeyPatch, **misfits: str) -> list[str]:
    """Installs nothing, but for the components named fails so; returns what is asked for, as it goes on."""
    asked: list[str] = []

    def fake(group: str, members: Any, version: str) -> installer.Outcome:
        asked.append(group)
        reason = misfits.get(group.partition(" ")[0], "")
        return installer.Outcome(group, "off" if reason else "on", reason)

    monkeypatch.setattr(activation, "_install", fake)
    return asked


def test_a_role_gets_its_own_part(configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = install(monkeypatch)
    for role in ROLES:
        activation.activate(role, configurations["gemma3"])
        on = {component for component, state in status.of(role).items() if state == ON}
        assert set(status.of(role)) == set(parts(role))
        assert f"report ({role})" in asked
        expected = {f"{component} ({role})" for component in on} | {f"report ({role})"}
        if role == "engine" and activation.on_trial(configurations["gemma3"]):
            expected.add("trial (engine)")
        assert expected == {group for group in asked if f"({role})" in group}
    assert "observe (api)" not in asked
    assert status.is_on("image_spans")


def test_a_component_needs_another(configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lazy_media="symbol changed")
    activation.activate("api", configurations["gemma3"])
    assert status.of("api")["lazy_media"] == State("off", "symbol changed")
    assert status.of("api")["image_extraction"] == State("off", "needs lazy_media, which is off")
    predicted = activation.predict(configurations["gemma3"])
    assert predicted["image_extraction"] == ON, "which fits here"


def test_a_component_needs_another_of_another_process(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes have the same reason, without a place; nothing is off where the other one is on."""
    install(monkeypatch)
    monkeypatch.setitem(COMPONENTS, "metrics", replace(COMPONENTS["metrics"], needs="block_keys"))
    for is_on, expected in ((True, ON), (False, State("off", "needs block_keys, which is off"))):
        monkeypatch.setattr(settings, "_current", chosen({"block_keys": is_on, "metrics": True}))
        for role in ROLES:
            activation.activate(role, configurations["gemma3"])
            assert status.of(role)["metrics"] == expected


def test_a_component_whose_hooks_can_not_be_imported_is_off(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this vLLM lacks a name that their module imports; all others are as they are with it."""
    monkeypatch.setattr(settings, "_current", chosen({"metrics": True}))
    config = configurations["gemma3"]
    activation.activate("api", config)
    expected, foreseen = dict(status.of("api")), activation.predict(config)
    assert expected["metrics"] == ON
    installer.undo("metrics (api)")
    monkeypatch.setitem(sys.modules, "vllm_mmcache.metrics.hooks", None)
    activation.activate("api", config)
    off = status.of("api")["metrics"]
    assert off.state == "off"
    assert off.reason.startswith("vllm_mmcache.metrics.hooks can't be imported (")
    assert status.of("api") == expected | {"metrics": off}
    assert activation.predict(config) == foreseen | {"metrics": off}


def test_a_component_whose_extension_can_not_be_imported_is_off(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(settings, "_current", chosen({"inner_checkpoints": True, "image_checkpoints": True}))
    monkeypatch.setitem(COMPONENTS, "inner_checkpoints", replace(COMPONENTS["inner_checkpoints"], rule=""))
    monkeypatch.setitem(sys.modules, f"{COMPONENTS['inner_checkpoints'].package}.vllm_blocks", None)
    activation.activate("engine", configurations["gemma3"])
    off = status.of("engine")["inner_checkpoints"]
    assert off.state == "off"
    assert "inner_checkpoints.vllm_blocks can't be imported (" in off.reason
    assert status.of("engine")["image_checkpoints"] == ON


def test_nothing_is_on_where_our_own_modules_can_not_be_imported(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("report", "trial_hooks", "hooks"):
        monkeypatch.setitem(sys.modules, f"vllm_mmcache.lifecycle.{module}", None)
    said = "vllm_mmcache.lifecycle.{} can't be imported ("
    monkeypatch.setattr(settings, "_current", settings.Settings(attention="reference"))
    with pytest.raises(
        HookError, match=r"attention=reference can't be had: vllm_mmcache\.lifecycle\.trial_hooks can't"
    ):
        activation.activate("engine", configurations["gemma3"])
    monkeypatch.setattr(settings, "_current", settings.Settings())
    assert activation.why_no_trial(configurations["gemma3"]).startswith(said.format("trial_hooks"))
    activation.activate("api", configurations["gemma3"])
    assert all(state.reason.startswith(said.format("report")) for state in status.of("api").values())
    assert all(state.reason.startswith(said.format("hooks")) for state in activation.predict().values())
    assert activation.start().reason.startswith(said.format("hooks"))


def test_what_is_foreseen_leaves_out_hooks_that_are_not_needed(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for pipeline stages may not fit where there are none."""

    def misfit(members: Any, version: str) -> str:
        return "symbol changed" if any(hook.only == "pipeline stages" for hook in members) else ""

    monkeypatch.setattr(activation, "incompatibility", misfit)
    monkeypatch.setattr(settings, "_current", chosen({"metrics": True}))
    config = copy.deepcopy(configurations["gemma3"])
    assert activation.predict(config)["metrics"] == ON
    config.parallel_config.pipeline_parallel_size = 2
    assert activation.predict(config)["metrics"] == State("off", "symbol changed")
    assert activation.predict()["metrics"] == State("off", "symbol changed"), "not known to be unneeded"


def test_what_only_a_start_can_tell_is_said(configurations: dict[str, Any]) -> None:
    """With a configuration, of what is on; the same component that is off has its own reason alone."""
    with_condition = {name: component.on_if for name, component in COMPONENTS.items() if component.on_if}
    assert set(with_condition) == {"features", "image_checkpoints", "inner_checkpoints"}
    found = activation.predict(configurations["qwen3-vl"])
    assert found["features"].reason.startswith(with_condition["features"])
    assert found["image_checkpoints"].reason.startswith(with_condition["image_checkpoints"])
    assert found["inner_checkpoints"] == State("unneeded", "this model has no Mamba layers")
    assert found["identity"] == ON
    assert activation.predict()["features"].reason == ""


def test_nothing_is_on_where_nobody_could_say_so(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, report="symbol changed")
    activation.activate("engine", configurations["gemma3"])
    assert set(status.of("engine").values()) == {State("off", "symbol changed")}


def test_what_is_foreseen_comes_true(configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for vllm_config in configurations.values():
        foreseen = activation.predict(vllm_config)
        predicted = {name: ON if state.state == "on" else state for name, state in foreseen.items()}
        for role in ROLES:
            activation.activate(role, vllm_config)
        found = {
            component: [status.of(role)[component] for role in ROLES if component in status.of(role)]
            for component in COMPONENT_NAMES
        }
        assert predicted == {component: states[0] for component, states in found.items()}
        assert all(len(set(states)) == 1 for states in found.values())


def test_required_salts_need_the_component(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Off by mismatch: an error that says what it means; where salts are required, no start."""
    install(monkeypatch, identity="symbol changed")
    monkeypatch.setattr(activation, "stop", lambda: None)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.ERROR, "vllm.mmcache"):
        activation.activate("api", configurations["qwen3-vl"])
    assert "identity is off (symbol changed): uuids of clients are trusted" in caplog.text
    monkeypatch.setattr(settings, "_current", settings.Settings(require_salt=True))
    with pytest.raises(HookError, match=r"require_salt is set, but identity is off \(symbol changed\)"):
        activation.activate("api", configurations["qwen3-vl"])
    activation.activate("engine", configurations["qwen3-vl"])  # has no part of it
    install(monkeypatch)
    activation.activate("api", configurations["qwen3-vl"])


def test_a_second_engine_that_takes_text_alone_leaves_the_first_ones_tenants_apart(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    text = copy.deepcopy(configurations["qwen3-vl"])
    text.model_config.multimodal_config = None
    activation.activate("api", text)
    assert status.of("api")["identity"].state == "unneeded"
    activation.activate("api", configurations["qwen3-vl"])
    activation.activate("api", text)
    assert status.of("api")["identity"] == ON


def test_what_works_on_vllms_scheduler_is_off_with_another_one(configurations: dict[str, Any]) -> None:
    config = copy.deepcopy(configurations["gemma3"])
    config.scheduler_config.scheduler_cls = AsyncScheduler
    assert activation.predict(config)["image_spans"].state == "on"
    config.scheduler_config.scheduler_cls = BareScheduler
    off = State("off", f"the scheduler {__name__}.BareScheduler is not derived from vLLM's")
    found = activation.predict(config)
    wanted = [name for name, one in parts("engine").items() if not one.opt_in]
    assert {found[name] for name in wanted if found[name].state != "unneeded"} == {off}
    assert found["identity"] == ON


def test_a_scheduler_that_is_only_where_the_engine_is(configurations: dict[str, Any]) -> None:
    """vLLM looks for it in the engine's process alone."""
    config = copy.deepcopy(configurations["gemma3"])
    config.scheduler_config.scheduler_cls = "nowhere.Scheduler"
    assert activation.predict(config)["image_spans"].state == "on"


class BareScheduler(SchedulerInterface):
    """Only implements the interface; never made."""


@pytest.mark.parametrize("misfit", ["report", "trial"])
def test_the_naive_attention_is_had_or_no_engine_starts(
    configurations: dict[str, Any], monkeypatch: pytest.MonkeyPatch, misfit: str
) -> None:
    """Also where the whole plugin would be off."""
    install(monkeypatch, **{misfit: "symbol changed"})
    activation.activate("engine", configurations["gemma3"])
    monkeypatch.setattr(settings, "_current", settings.Settings(attention="reference"))
    with pytest.raises(HookError, match=r"attention=reference can't be had: symbol changed\. Unset MMCACHE_ATTENTION"):
        activation.activate("engine", configurations["gemma3"])
    install(monkeypatch)
    activation.activate("engine", configurations["gemma3"])


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_store_that_others_can_reach_is_a_warning(
    is_trusted: bool,
    configurations: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the API server, once."""
    install(monkeypatch)
    monkeypatch.setenv("MMCACHE_STORE", "redis://u:secret@cache")
    chosen = settings.load_settings({"store_trusted_network": is_trusted})
    monkeypatch.setattr(settings, "_current", chosen)
    with caplog.at_level(logging.WARNING, "vllm.mmcache"):
        for role in ROLES:
            activation.activate(role, configurations["qwen3-vl"])
    said = [line for line in caplog.messages if "open to others" in line]
    assert len(said) == (0 if is_trusted else 1)
    assert all("redis://***@cache has no TLS" in line and "MMCACHE_STORE_KEY_FILE" in line for line in said)
