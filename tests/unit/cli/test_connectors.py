# SPDX-License-Identifier: Apache-2.0
"""What vLLM's LMCache connectors know of an image, as `mmcache doctor` says it. Read: LMCache is not installed here.

Tripwires: when one fails, vLLM has changed it, and the finding in cli/connectors.py goes or changes.
"""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from vllm_mmcache.cli import connectors

PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"


def source(module: str) -> str:
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / f"{module}.py").read_text()


def test_the_multi_process_connector_asks_by_token_ids_alone() -> None:
    text = source("lmcache_mp_connector")
    assert "token_ids=list(request.all_token_ids)" in text
    for word in ("mm_features", "mm_hash", "identifier"):
        assert word not in text
    assert "mm_features" in source("example_connector"), "negative control: this one knows images"


def test_the_native_connector_knows_an_image_by_sixteen_bits() -> None:
    assert "return int(s, 16) & 0xFFFF" in source("lmcache_integration/utils")
    assert "hex_hash_to_int16(hash_str)" in source("lmcache_integration/utils")


@pytest.mark.parametrize(
    ("name", "extra", "says"),
    [
        ("LMCacheMPConnector", {}, "token ids alone"),
        ("LMCacheConnectorV1", {"use_native": True}, "16 bits"),
        ("LMCacheConnectorV1", {}, ""),
        ("MultiConnector", {"connectors": [{"kv_connector": "LMCacheMPConnector"}]}, "token ids alone"),
    ],
)
def test_doctor_says_so_of_models_that_take_images(name: str, extra: dict[str, Any], says: str) -> None:
    """vLLM makes no configuration of these without LMCache: its own transfer configuration, the rest stands for it."""
    transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
    for takes_images in (True, False):
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            model_config=SimpleNamespace(multimodal_config=object() if takes_images else None),
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        )
        seen = [finding["seen"] for finding in connectors.findings(config, "cuda", is_identity_on=True)]
        assert len(seen) == bool(says and takes_images)
        assert all(says in sentence for sentence in seen)
