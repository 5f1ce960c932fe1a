# SPDX-License-Identifier: Apache-2.0
"""The digest of a configuration changes with what decides how an engine computes, and with nothing else."""

import copy
import gc
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached

from vllm_mmcache.lifecycle import configuration
from vllm_mmcache.lifecycle.configuration import digest, digest_now

pytestmark = pytest.mark.usefixtures("nothing_stays_installed", "no_role")


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    return EngineArgs(str(model), dtype="float32", enforce_eager=True).create_engine_config()


def test_what_counts(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = digest_now(vllm_config)
    other = copy.deepcopy(vllm_config)
    assert digest_now(other) == known
    other.model_config.hf_config.text_config.hidden_size *= 2
    assert digest_now(other) != known, "another model at the same path"
    other = copy.deepcopy(vllm_config)
    other.cache_config.cache_dtype = "fp8"
    assert digest_now(other) != known
    other = copy.deepcopy(vllm_config)
    other.cache_config.num_gpu_blocks = 12345
    assert digest_now(other) == known
    other = copy.deepcopy(vllm_config)
    other.cache_config.block_size *= 2
    assert digest_now(other) == known, "one that vLLM has chosen"
    other.cache_config.user_specified_block_size = True
    assert digest_now(other) != known
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert digest_now(vllm_config) == known
    monkeypatch.setenv("VLLM_FLASH_ATTN_VERSION", "2")
    assert digest_now(vllm_config) != known


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
    assert digest_now(other) != digest_now(vllm_config)


@pytest.mark.parametrize(("is_moe", "counts"), [(False, False), (True, True)])
def test_data_parallel_engines_count_where_they_work_together(
    vllm_config: Any, is_moe: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of any other model is told that it is alone; its API server knows of all."""
    monkeypatch.setattr(type(vllm_config.model_config), "is_moe", is_moe)
    other = copy.deepcopy(vllm_config)
    other.parallel_config.data_parallel_size = 2
    assert (digest_now(other) != digest_now(vllm_config)) == counts


def test_a_length_that_fits_the_free_memory_does_not_count(vllm_config: Any) -> None:
    """The control is one that the user has given."""
    one = copy.deepcopy(vllm_config)
    one.model_config.max_model_len = 128
    assert digest_now(one) != digest_now(vllm_config)
    other = copy.deepcopy(vllm_config)
    one.model_config.original_max_model_len = other.model_config.original_max_model_len = -1
    assert digest_now(one) == digest_now(other)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_connectors_count(vllm_config: Any, role: Any) -> None:
    from vllm.config import KVTransferConfig

    digests = {digest_now(vllm_config)}
    for connector in ("ExampleConnector", "NixlConnector"):
        other = copy.deepcopy(vllm_config)
        other.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role=role)
        digests.add(digest_now(other))
    other.kv_transfer_config.kv_role = "kv_producer"
    assert len({*digests, digest_now(other)}) == 4


def test_what_vllm_writes_later_does_not_count(vllm_config: Any) -> None:
    """While a model is loaded, vLLM writes what it has chosen into the configuration."""
    other = copy.deepcopy(vllm_config)
    known, remembered_as = digest(other), id(other)
    other.cache_config.cache_dtype = "fp8"
    assert digest(other) == known != digest_now(other)
    assert configuration._digests[remembered_as] == known
    del other
    gc.collect()
    assert remembered_as not in configuration._digests, "one that is gone, whose id another may get"


def test_every_name_is_one_of_vllm(vllm_config: Any) -> None:
    """A part or a field that vLLM has renamed would count no more."""
    from vllm.config import KVTransferConfig, SpeculativeConfig

    absent = {"kv_transfer_config": KVTransferConfig, "speculative_config": SpeculativeConfig, "lora_config": None}
    for part, names in configuration._PARTS.items():
        found = getattr(vllm_config, part) or absent[part]
        assert all(hasattr(found, name) or name in vars(found)["__dataclass_fields__"] for name in names), part
    for name in (*configuration._MODEL, "original_max_model_len", "is_moe"):
        assert hasattr(vllm_config.model_config, name), name
    assert hasattr(vllm_config.cache_config, "user_specified_block_size")
