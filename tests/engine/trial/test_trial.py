# SPDX-License-Identifier: Apache-2.0
"""The trial of an engine passes what is right, finds every planted fault, and leaves nothing behind."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig

from tests.support.observing import observing, picture, user
from tests.support.planted_faults import FAULTS, plant
from tests.support.sizes import larger
from vllm_mmcache.base import status
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.components.observe.observer import OBSERVER
from vllm_mmcache.lifecycle.rank_sync import of_ranks
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS
from vllm_mmcache.metrics import counters, transport
from vllm_mmcache.reference_attention.comparison import KINDS
from vllm_mmcache.reference_attention.vllm_layers import ReferenceLayers
from vllm_mmcache.trial import vllm_engine, vllm_prompts, worker
from vllm_mmcache.trial.sequence import Trial
from vllm_mmcache.trial.verdict import Verdict

pytestmark = pytest.mark.engine

FAMILIES = ("qwen3-vl", "gemma3", "gemma4", "qwen3.5")
FIRST = {
    "qwen3-vl": ("feature_of_another_image", "feature_shifted_by_a_row", "feature_of_other_weights"),
    "gemma3": (
        "checkpoint_off_by_a_block",
        "keys_forget_the_second_image",
        "span_cut_in_the_middle",
        "causal_images",
    ),
    "qwen3.5": ("keys_forget_the_second_image", "inner_checkpoint_off"),
}
"""What is planted in each run of the tests; the other families and faults in the larger ones."""
PLANTED = [
    pytest.param(family, name, marks=() if name in FIRST.get(family, ()) else larger, id=f"{family}-{name}")
    for name, fault in FAULTS.items()
    for family in fault.families
]
PRECISIONS = {"qwen3-vl-moe": "bfloat16"}
"""Where small differences choose other experts, and so become large ones."""
LONG_S = 300.0
MOST_REQUESTS = 12

Get = Callable[[str], ZooRig]


@pytest.fixture
def get(pool: EnginePool) -> Get:
    """An engine of a family, as a server has it."""
    return lambda family: pool.get(
        EngineConfig(family, block_tokens=None, max_tokens=4096, precision=PRECISIONS.get(family))
    )


@pytest.fixture
def told() -> Iterator[dict[str, str]]:
    """What the trial switched off, by component; it is on again afterwards."""
    found: dict[str, str] = {}
    yield found
    for component in found:
        for role in ("engine", "worker"):
            if component in status.of(role):
                status.put(role, component, ON)


def tried(rig: ZooRig, told: dict[str, str], seconds: float = LONG_S) -> Verdict:
    """The trial of an engine; what it switches off is off in this process, which is the engine's and its worker's."""

    def switch_off(component: str, reason: str) -> None:
        told[component] = reason
        for role in ("engine", "worker"):
            if component in status.of(role):
                status.put(role, component, State("off", reason))
        if component == "block_keys":
            core(rig).request_block_hasher = hasher.instead()

    hasher = core(rig).request_block_hasher
    try:
        return Trial(core(rig), on(rig), seconds, switch_off).run()
    finally:
        core(rig).request_block_hasher = hasher


def core(rig: ZooRig) -> Any:
    return rig.llm.llm_engine.engine_core.engine_core


def on(rig: ZooRig) -> list[str]:
    """The components that are on in this engine, and can be tried."""
    places = [status.of("engine"), *of_ranks(core(rig).model_executor).values()]
    return [
        name
        for name in ENGINE_COMPONENTS
        if any(name in states for states in places)
        and all(states.get(name, ON) == ON for states in places)
        and not (name in ("image_checkpoints", "inner_checkpoints") and rig.keeps_all_kv)
    ]


@pytest.mark.any_engine
@pytest.mark.every_engine
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_right_passes(get: Get, told: dict[str, str], family: str) -> None:
    rig = get(family)
    components = on(rig)
    assert {"block_keys", "features"} <= set(components)
    verdict = tried(rig, told)
    assert (verdict.differed, verdict.untried, told) == ({}, {}, {})
    assert sorted(verdict.passed) == sorted(components)
    assert verdict.num_requests <= MOST_REQUESTS
    assert verdict.attention_wrong == ""
    assert all(f"({kind})" in verdict.attention for kind in KINDS), verdict.attention


def test_beside_a_processor_cache_in_shared_memory(pool: EnginePool, told: dict[str, str]) -> None:
    """Its segment has one name, and is there already when the trial renders its questions."""
    shared = (("mm_processor_cache_type", "shm"),)
    rig = pool.get(EngineConfig("qwen3-vl", block_tokens=None, max_tokens=4096, more=shared))
    assert core(rig).vllm_config.model_config.multimodal_config.mm_processor_cache_type == "shm"
    verdict = tried(rig, told)
    assert verdict.untried == {}
    assert sorted(verdict.passed) == sorted(on(rig))
    assert core(rig).vllm_config.model_config.multimodal_config.mm_processor_cache_gb > 0


def test_where_a_prompt_of_a_user_may_have_one_image(pool: EnginePool, told: dict[str, str]) -> None:
    rig = pool.get(EngineConfig("qwen3-vl", block_tokens=None, max_tokens=4096, num_images=1))
    limits = core(rig).vllm_config.model_config.multimodal_config
    verdict = tried(rig, told)
    assert verdict.untried == {}
    assert sorted(verdict.passed) == sorted(on(rig))
    assert limits.get_limit_per_prompt("image") == 1


def test_metrics_pass_where_nothing_else_counts(
    get: Get, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with features off, on a model without checkpoints. The control: counts of workers that are lost."""
    rig = get("qwen3-vl")
    for name in ("TOWER_IMAGES", "CHECKPOINTS_USED"):
        monkeypatch.setattr(getattr(counters, name), "add", lambda amount=1: None)
    monkeypatch.setattr("vllm_mmcache.metrics.table_sizes.take_changed", dict)
    assert "metrics" in tried(rig, told).passed
    monkeypatch.setattr(worker, "PROBE", "another name")
    monkeypatch.setattr(transport, "count", lambda name, amount: None)
    assert "metrics" in tried(rig, told).untried


def test_attention_that_can_not_be_watched_ends_no_trial(
    get: Get, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers are watched when it fails; the next comparison finds them as they were."""

    def fails(self: Any, layer: Any, computed: Any) -> None:
        note_layer(self, layer, computed)
        raise AttributeError("no such builder")

    note_layer = ReferenceLayers._note_layer
    rig = get("qwen3-vl")
    with monkeypatch.context() as within:
        within.setattr(ReferenceLayers, "_note_layer", fails)
        verdict = tried(rig, told)
    assert sorted(verdict.passed) == sorted(on(rig))
    assert "no such builder" in verdict.attention
    assert "attention computed anew: rows" in tried(rig, told).attention


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5"])
def test_nothing_is_left(get: Get, told: dict[str, str], family: str) -> None:
    rig = get(family)
    scheduler = rig.scheduler
    before = counters.snapshot()
    own = dict(vars(scheduler))
    drawn = np.random.get_state(legacy=False)["state"]["pos"]
    verdict = tried(rig, told)
    assert verdict.passed
    assert np.random.get_state(legacy=False)["state"]["pos"] == drawn, "with which users' requests without a seed go on"
    assert counters.snapshot() == before
    assert not scheduler.requests
    assert not scheduler.encoder_cache_manager.cached
    assert len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block) == 0
    assert scheduler.kv_cache_manager.block_pool.get_usage() == 0
    assert rig.features.store.ram.size().entries == 0
    assert not any(rig.features.store.counts()["ram"].values())
    assert scheduler.kv_event_publisher is own["kv_event_publisher"]
    assert "schedule" not in vars(scheduler)
    assert scheduler.max_num_scheduled_tokens == own["max_num_scheduled_tokens"]
    assert not transport._feature_sources


def test_the_history_of_requests_has_none_of_the_trial(pool: EnginePool, told: dict[str, str]) -> None:
    """The control: a question of a user is one."""
    with observing(pool, EngineConfig("qwen3-vl")) as engine:
        manager = core(engine.rig).scheduler.kv_cache_manager
        for place in (manager, manager.block_pool):
            vars(place).pop(OBSERVER, None)
        assert status.is_on("observe")
        assert tried(engine.rig, told).passed
        observer = getattr(manager, OBSERVER)
        assert (observer.history.size().entries, observer.waiting) == (0, {})
        engine.chat(user(picture("one"), "What is it?"))
        assert observer.history.size().entries == 1


@pytest.mark.parametrize(("family", "name"), PLANTED)
def test_a_planted_fault_is_found(
    get: Get, told: dict[str, str], family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = get(family)
    fault = FAULTS[name]
    if fault.component not in on(rig):
        pytest.skip(f"{fault.component} is not on here")
    plant(name, monkeypatch.setattr)
    verdict = tried(rig, told)
    assert set(verdict.differed) == {fault.component}, str(verdict)
    assert set(told) == {fault.component}
    others = set(on(rig)) - {fault.component}
    assert others <= set(verdict.passed), str(verdict)


def test_time_that_is_over_switches_off_what_is_left(get: Get, told: dict[str, str]) -> None:
    rig = get("qwen3-vl")
    verdict = tried(rig, told, seconds=0.0)
    assert verdict.passed == []
    assert set(verdict.untried) == set(told) != set()
    assert all("trial_s" in why for why in verdict.untried.values())


def test_a_model_without_a_chat_template(get: Get, told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = get("qwen3-vl")

    def no_template(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("As of transformers v4.44, default chat template is no longer allowed")

    monkeypatch.setattr("vllm.renderers.hf.safe_apply_chat_template", no_template)
    verdict = tried(rig, told)
    assert verdict.num_requests == 0
    assert all("default chat template" in why for why in verdict.untried.values())
    assert set(told) == set(verdict.untried) != set()


def test_a_processor_that_refuses_the_pictures(get: Get, told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = get("qwen3-vl")
    monkeypatch.setattr(vllm_prompts, "PICTURE_PX", (2, 2000))  # Qwen's takes no such shape
    verdict = tried(rig, told)
    assert verdict.passed == []
    assert all("could not be rendered" in why for why in verdict.untried.values())


def test_a_kv_cache_that_holds_no_question(pool: EnginePool, told: dict[str, str]) -> None:
    rig = pool.get(EngineConfig("qwen3-vl", num_blocks=8, max_tokens=192))
    verdict = tried(rig, told)
    assert verdict.passed == []
    assert set(told) == set(verdict.untried) != set()


def test_an_engine_that_fails_in_the_trial(get: Get, told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = get("qwen3-vl")

    def fails(self: Any) -> Any:
        raise RuntimeError("a kernel could not be compiled")

    monkeypatch.setattr(vllm_engine.TrialEngine, "_step", fails)
    verdict = tried(rig, told)
    assert all("a kernel could not be compiled" in why for why in verdict.untried.values())
    assert not rig.scheduler.requests
