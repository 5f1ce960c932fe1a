# SPDX-License-Identifier: Apache-2.0
"""The offline API on a real engine: uuids and salts in the prompt, and what the vision tower runs for."""

from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support.towers import Runs, ask_named
from vllm_mmcache.base import settings
from vllm_mmcache.exactness.conversations import filler, picture, user

pytestmark = pytest.mark.engine

QWEN = [pytest.param(EngineConfig("qwen3-vl"), id="qwen3-vl")]


@pytest.fixture(autouse=True)
def as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings())


def alone(rig: ZooRig, uuid: Any, salt: str | None = None) -> Any:
    """The output for a uuid without its picture."""
    prompt, _ = rig.render([user(filler(40), picture(700), "What is it?")])
    request: dict[str, Any] = {
        "prompt": prompt, "multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": uuid},
    }  # fmt: skip
    if salt:
        request["cache_salt"] = salt
    (output,) = rig.llm.generate(
        [request], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), use_tqdm=False
    )
    return output


def salted(rig: ZooRig, number: int, uuid: str, salt: str) -> Any:
    prompt, images = rig.render([user(filler(40), picture(number), "What is it?")])
    (answer,) = rig.ask_rendered([(prompt, images)], [8], salts=[salt], uuids=[[uuid]])
    return answer


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_a_uuid_is_an_alias(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    first = ask_named(rig, 701, "x")
    assert tuple(alone(rig, ["x"]).outputs[0].token_ids) == first.token_ids
    assert tuple(alone(rig, "x").outputs[0].token_ids) == first.token_ids  # a string for the one image
    second = ask_named(rig, 702, "x")
    assert first.token_ids != second.token_ids
    assert tuple(alone(rig, ["x"]).outputs[0].token_ids) == second.token_ids
    rig.assert_exact([first, second])


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_another_tenant_costs_the_whole_image(pool: EnginePool, config: EngineConfig) -> None:
    """Nothing cached, and a run of the tower: as for an image that was never sent. Without salts both are saved."""
    rig, runs = pool.get(config), Runs()
    answers = [salted(rig, 703, "x", salt) for salt in ("a", "b", "a", "c")]
    assert [answer.num_cached_tokens > 0 for answer in answers] == [False, False, True, False]
    assert runs.new() == 3
    rig.forget_all_but_features()
    answers += [salted(rig, 703, "y", "a"), salted(rig, 703, "x", "d")]
    assert runs.new() == 1  # for d: a's features are kept for a
    rig.assert_exact(answers)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_refusals(pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = pool.get(config)
    salted(rig, 704, "mine", "a")
    for uuid, salt, error, said in (
        ("mine", "b", ValueError, "Cache miss for image at index 0 but data is not provided"),
        ("mine", None, ValueError, "Cache miss for image at index 0"),
        ("u" * 129, None, VLLMValidationError, "at most 128 characters"),
        ("\ud800", None, VLLMValidationError, "not valid Unicode"),
        (7, None, VLLMValidationError, "must be a string"),
    ):
        with pytest.raises(error, match=said):
            alone(rig, [uuid], salt)
    monkeypatch.setattr(settings, "_current", settings.Settings(require_salt=True))
    with pytest.raises(VLLMValidationError, match="cache_salt"):
        ask_named(rig, 704, "mine")
    answer = salted(rig, 704, "mine", "a")
    (text,) = rig.llm.generate(["Text needs no salt."], SamplingParams(max_tokens=1), use_tqdm=False)
    assert text.outputs
    rig.assert_exact([answer])


@pytest.mark.parametrize("config", QWEN)
def test_eviction_between_alias_and_use(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    answer = ask_named(rig, 705, "gone")
    rig.llm.llm_engine.reset_mm_cache()
    with pytest.raises(ValueError, match="Cache miss for image at index 0"):
        alone(rig, ["gone"])
    again = ask_named(rig, 705, "gone")
    assert again.token_ids == answer.token_ids
    assert tuple(alone(rig, ["gone"]).outputs[0].token_ids) == answer.token_ids
