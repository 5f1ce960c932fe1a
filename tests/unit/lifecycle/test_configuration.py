# SPDX-License-Identifier: Apache-2.0
"""The digest of a configuration changes with what decides how an engine computes, and with nothing else."""

import copy
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached

from vllm_mmcache.lifecycle.configuration import digest

pytestmark = pytest.mark.usefixtures("nothing_stays_installed", "no_role")


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    return EngineArgs(str(model), dtype="float32", enforce_eager=True).create_engine_config()


def test_what_counts(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = digest(vllm_config)
    other = copy.deepcopy(vllm_config)
    assert digest(other) == known
    other.model_config.hf_config.text_config.hidden_size *= 2
    assert digest(other) != known, "another model at the same path"
    other = copy.deepcopy(vllm_config)
    other.cache_config.cache_dtype = "fp8"
    assert digest(other) != known
    other = copy.deepcopy(vllm_config)
    other.cache_config.num_gpu_blocks = 12345
    assert digest(other) == known
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert digest(vllm_config) == known
    monkeypatch.setenv("VLLM_FLASH_ATTN_VERSION", "2")
    assert digest(vllm_config) != known
