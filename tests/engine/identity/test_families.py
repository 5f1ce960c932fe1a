# SPDX-License-Identifier: Apache-2.0
"""Identity and block keys on a real engine of each later family: names are aliases, tenants share nothing.

The first families are attacked over HTTP in tests/system/identity; here each kind of placeholder (tiles, rows, a number
of the picture in its own prefix) goes through the same wrappers.
"""

from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.zoo import MORE_FAMILIES
from vllm import SamplingParams

from vllm_mmcache.base import settings
from vllm_mmcache.exactness.answers import Answer
from vllm_mmcache.exactness.conversations import filler, picture, user

pytestmark = pytest.mark.engine

CONFIGS = [pytest.param(EngineConfig(family), id=family) for family in MORE_FAMILIES]


@pytest.fixture(autouse=True)
def as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings())


def prompt_of(rig: ZooRig, number: int) -> Any:
    return rig.render([user(filler(180), picture(number), "What is it?" + filler(20))])


def named(rig: ZooRig, number: int, name: str, salt: str | None = None) -> Answer:
    (answer,) = rig.ask_rendered([prompt_of(rig, number)], [8], salts=[salt], uuids=[[name]])
    return answer


def alone(rig: ZooRig, number: int, name: str) -> Answer:
    """The answer to a request that names the picture and doesn't bring it."""
    prompt, images = prompt_of(rig, number)
    request = {"prompt": prompt, "multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": [name]}}
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=10, ignore_eos=True)
    (output,) = rig.llm.generate([request], params, use_tqdm=False)
    return Answer.of(prompt, images, output)


@pytest.mark.parametrize("config", CONFIGS)
def test_names_are_aliases(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    first = named(rig, 910, "x")
    renamed = named(rig, 910, "y")
    unsent = alone(rig, 910, "x")
    swapped = named(rig, 911, "x")  # negative control: the name alone is worth nothing
    start = rig.image_spans(first)[0][0]
    assert first.num_cached_tokens == 0
    assert renamed.num_cached_tokens > 0
    assert unsent.num_cached_tokens > 0
    if rig.family.keeps_all_kv:
        assert min(renamed.num_cached_tokens, unsent.num_cached_tokens) > start
    assert swapped.num_cached_tokens <= start
    assert first.token_ids == renamed.token_ids == unsent.token_ids != swapped.token_ids
    rig.assert_exact([first, renamed, unsent, swapped])


@pytest.mark.parametrize("config", CONFIGS)
def test_tenants_share_nothing(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    answers = [named(rig, 912, "x", salt) for salt in ("a", "b", "a")]
    assert [answer.num_cached_tokens > 0 for answer in answers] == [False, False, True]
    rig.assert_exact(answers)


@pytest.mark.parametrize("config", CONFIGS)
def test_block_keys_are_ours(pool: EnginePool, config: EngineConfig) -> None:
    """What hashes the blocks of this engine's requests is the component's hasher, not vLLM's."""
    core = pool.get(config).llm.llm_engine.engine_core.engine_core
    assert core.request_block_hasher.__module__.startswith("vllm_mmcache.")
