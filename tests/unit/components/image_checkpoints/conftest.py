# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler for three kinds of model, without the model."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from mmcache_tools.zoo import build_cached
from vllm.config import VllmConfig

from tests.support.schedulers import Sparse, Steps, engine_config, groups, make_scheduler, take_back
from vllm_mmcache.base import settings
from vllm_mmcache.components.image_checkpoints.step_cost import StepCost
from vllm_mmcache.lifecycle import activation, rank_sync

KINDS: dict[str, tuple[str, Sparse, int]] = {
    "full attention": ("qwen3-vl", "", 1),
    "windows": ("gemma3", "window", 6),
    "mamba": ("qwen3.5", "mamba", 6),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], VllmConfig]:
    root = tmp_path_factory.mktemp("zoo")

    def config(kind: str, is_async: bool) -> VllmConfig:
        dtype = {"dtype": "bfloat16"} if kind == "mamba" else {}
        return engine_config(build_cached(KINDS[kind][0], root), is_async=is_async, max_num_seqs=256, **dtype)

    return config


@pytest.fixture
def engine(
    configs: Callable[[str, bool], VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Steps]]:
    """An engine but for its model, with the plugin's components as they are by default where they are proven.

    Or with none, until the next one is started. inner: whether states are kept inside chunks, too. Steps without a
    model tell nothing of what one costs, so what is assumed stays.
    """
    monkeypatch.setattr(StepCost, "add", lambda *_: None)

    def start(
        kind: str,
        is_async: bool = False,
        *,
        with_plugin: bool = True,
        inner: bool = False,
        num_blocks: int = 20_000,
    ) -> Steps:
        given = settings.load_settings({"unproven": True, "features": False, "inner_checkpoints": inner})
        monkeypatch.setattr(settings, "_current", given)
        config = configs(kind, is_async)
        _, sparse, num_groups = KINDS[kind]
        if with_plugin:
            activation.activate("engine", config)
        else:
            take_back()
        scheduler = make_scheduler(config, groups(sparse, num_groups), num_blocks, with_plugin=with_plugin)
        if with_plugin:
            rank_sync.of_engine(SimpleNamespace(scheduler=scheduler, model_executor=None))
        return Steps(scheduler, is_async)

    yield start
    take_back()
