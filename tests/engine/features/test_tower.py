# SPDX-License-Identifier: Apache-2.0
"""The probe at start, on real engines: which towers it takes, and which it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.components.features.worker.vllm_probe import Unsupported, probe, trial_inputs

CONFIG = EngineConfig("qwen3-vl")


def mixes(embed: Callable[..., Any], model: Any) -> Callable[..., Any]:
    def embed_multimodal(**inputs: Any) -> list[torch.Tensor]:
        found = list(embed(**inputs))
        return [one + sum(other.mean() for other in found) for one in found]

    return embed_multimodal


def reads_the_language_model(embed: Callable[..., Any], model: Any) -> Callable[..., Any]:
    def embed_multimodal(**inputs: Any) -> Any:
        model.get_language_model().embed_input_ids(torch.tensor([0]))
        return embed(**inputs)

    return embed_multimodal


def is_blind(embed: Callable[..., Any], model: Any) -> Callable[..., Any]:
    return lambda **inputs: [torch.zeros_like(one) for one in embed(**inputs)]


def drops_rows(embed: Callable[..., Any], model: Any) -> Callable[..., Any]:
    return lambda **inputs: [one[1:] for one in embed(**inputs)]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (mixes, "one of the images of a batch depends on the others"),
        (reads_the_language_model, "runs VocabParallelEmbedding of the language model"),
        (is_blind, "two images have the same features"),
        (drops_rows, r"images of 64 tokens have features \(63, 512\)"),
    ],
)
@pytest.mark.parametrize("config", [CONFIG], ids=["qwen3-vl"])
def test_the_probe(
    pool: EnginePool, config: EngineConfig, spoil: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = pool.get(config)
    model, vllm_config = rig.runner.get_model(), rig.llm.llm_engine.vllm_config
    trial = vllm_config, model, Tower(model), rig.runner.device, trial_inputs(vllm_config, model, "image")
    assert probe(*trial).width == 512
    monkeypatch.setattr(model, "embed_multimodal", spoil(model.embed_multimodal, model), raising=False)
    with pytest.raises(Unsupported, match=said):
        probe(*trial)
