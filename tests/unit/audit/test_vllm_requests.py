# SPDX-License-Identifier: Apache-2.0
"""Which finished requests can be asked again."""

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from vllm_mmcache.audit import vllm_requests
from vllm_mmcache.audit.vllm_requests import STEP_TOKENS, AuditedEngine, sample_of
from vllm_mmcache.content import image_namer

USED = frozenset({"features"})


def feature(data: Any) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(data, "image", "name", PlaceholderRange(offset=3, length=4), "name")


def pixels() -> MultiModalKwargsItem:
    elem = MultiModalFieldElem(data=torch.zeros(3, 8), field=MultiModalSharedField(batch_size=1))
    return MultiModalKwargsItem({"pixel_values": elem})


def request(data: Any, **values: Any) -> Any:
    known = {
        "request_id": "a client's own",
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "lora_request": None,
        "resumable": False,
        "cache_salt": "tenant",
        "mm_features": [feature(data)],
        "sampling_params": SamplingParams(extra_args={}),
        "pooling_params": None,
    }
    return SimpleNamespace(**{**known, **values})


def test_a_sample() -> None:
    known = request(pixels())
    image_namer.mark(known, None)
    sample = sample_of(known, USED)
    assert sample is not None
    assert sample.namer == image_namer.of(known) is not None
    assert sample.num_bytes == 3 * 8 * 4
    assert sample.salt == "tenant"
    assert sample.components == USED
    assert "a client's own" not in sample.name
    assert sample.describe() == "3 tokens, 0 of them cached, images of (4 at 3) tokens"


@pytest.mark.parametrize(
    ("data", "values"),
    [
        pytest.param(None, {}, id="sent by its name alone"),
        pytest.param({"address": None}, {}, id="in shared memory"),
        pytest.param("here", {"lora_request": object()}, id="adapter"),
        pytest.param("here", {"prompt_token_ids": None}, id="embeddings"),
        pytest.param("here", {"resumable": True}, id="session"),
    ],
)
def test_what_can_not_be_asked_again(data: Any, values: dict[str, Any]) -> None:
    assert sample_of(request(pixels() if data == "here" else data, **values), USED) is None


@pytest.mark.parametrize(
    ("part", "value", "why"),
    [
        ("model_config.is_hybrid", True, "Mamba layers round otherwise"),
        ("model_config.runner_type", "pooling", "no log-probabilities"),
        ("cache_config.enable_prefix_caching", False, "prefix caching is off"),
        ("kv_transfer_config", object(), "a connector"),
        ("speculative_config", object(), "speculative decoding"),
    ],
)
def test_an_engine_that_can_not_be_audited(part: str, value: Any, why: str) -> None:
    model = SimpleNamespace(
        runner_type="generate", max_logprobs=20, logprobs_mode="raw_logprobs", is_hybrid=False, is_moe=False
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
    )
    engine = SimpleNamespace(vllm_config=config)
    assert vllm_requests.why_not(config) == ""
    owner, _, name = f"vllm_config.{part}".rpartition(".")
    setattr(attrgetter(owner)(engine), name, value)
    assert why in vllm_requests.why_not(config)


@pytest.mark.parametrize(
    ("step_tokens", "block_tokens", "image_tokens"),
    [(8192, 16, 0), (512, 16, 0), (1000, 16, 0), (8192, 2048, 0), (8192, 16, 280), (8192, 16, 2000), (1000, 128, 280)],
)
@pytest.mark.parametrize(("hit", "prompt"), [(hit, hit + 90) for hit in (900, 2040, 2048, 4000, 8192)] + [(0, 5000)])
def test_the_third_question_has_other_chunks(
    monkeypatch: pytest.MonkeyPatch, hit: int, prompt: int, image_tokens: int, block_tokens: int, step_tokens: int
) -> None:
    engine = AuditedEngine.__new__(AuditedEngine)
    vars(engine).update(_core=SimpleNamespace(vllm_config=None), _step_tokens=step_tokens, _block_tokens=block_tokens)
    monkeypatch.setattr(vllm_requests, "keeps_images_whole", lambda vllm_config: image_tokens)
    monkeypatch.setattr(vllm_requests, "image_spans", lambda request: [(16, 16 + image_tokens - 1)])
    asked = SimpleNamespace(num_tokens=prompt)
    cold, again = engine._limit(asked, None), engine._limit(asked, hit)
    assert cold != again
    assert image_tokens <= min(cold, again)
    assert max(cold, again) <= min(step_tokens, max(STEP_TOKENS, image_tokens) + 3 * block_tokens)
