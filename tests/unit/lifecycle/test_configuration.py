# SPDX-License-Identifier: Apache-2.0
"""The digest of a configuration changes with what decides how an engine computes, and with nothing else."""

import copy
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached

from vllm_mmcache.lifecycle import configuration
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
    other = copy.deepcopy(vllm_config)
    other.cache_config.block_size *= 2
    assert digest(other) == known, "one that vLLM has chosen"
    other.cache_config.user_specified_block_size = True
    assert digest(other) != known
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert digest(vllm_config) == known
    monkeypatch.setenv("VLLM_FLASH_ATTN_VERSION", "2")
    assert digest(vllm_config) != known


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("load_config", "load_format", "dummy"),
        ("kernel_config", "moe_backend", "triton"),
        ("kernel_config", "linear_backend", "triton"),
        ("scheduler_config", "disable_hybrid_kv_cache_manager", True),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("parallel_config", "all2all_backend", "deepep_low_latency"),
    ],
)
def test_each_of_these_counts(vllm_config: Any, part: str, name: str, value: Any) -> None:
    other = copy.deepcopy(vllm_config)
    assert hasattr(getattr(other, part), name), "vLLM has no such field"
    object.__setattr__(getattr(other, part), name, value)
    assert digest(other) != digest(vllm_config)


def test_another_connector_counts(vllm_config: Any) -> None:
    from vllm.config import KVTransferConfig

    other = copy.deepcopy(vllm_config)
    other.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert digest(other) != digest(vllm_config)


def test_every_name_is_one_of_vllm(vllm_config: Any) -> None:
    """A part or a field that vLLM has renamed would count no more."""
    for part, names in configuration._PARTS.items():
        assert hasattr(vllm_config, part)
        found = getattr(vllm_config, part)
        assert found is None or all(hasattr(found, name) for name in names), part
    assert all(hasattr(vllm_config.model_config, name) for name in configuration._MODEL)
