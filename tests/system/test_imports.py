# SPDX-License-Identifier: Apache-2.0
"""Importing is cheap, each in a process of its own: no vLLM or torch where none is needed."""

import subprocess
import sys

import pytest


def loaded_by(modules: str) -> set[str]:
    """What a fresh interpreter has in sys.modules after it imported `modules`, a list with commas."""
    code = f"import sys, {modules}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    found = set(done.stdout.split())
    assert {name.strip() for name in modules.split(",")} <= found
    return found


@pytest.mark.process
def test_importing_the_package_is_cheap() -> None:
    found = loaded_by(
        "vllm_mmcache, mmcache_tools.zoo, vllm_mmcache.components.block_keys, vllm_mmcache.environment, "
        "vllm_mmcache.prove.runs, mmcache_tools.prove_zoo.items"
    )
    assert not found & {"torch", "vllm", "transformers", "numpy", "pydantic", "rich", "typer", "wrapt"}


@pytest.mark.process
def test_the_client_is_cheap() -> None:
    found = loaded_by("vllm_mmcache.client")
    assert not found & {"torch", "vllm", "numpy", "PIL", "pydantic", "openai", "httpx", "prometheus_client"}


@pytest.mark.process
def test_the_feature_store_loads_what_it_needs() -> None:
    found = loaded_by(
        "vllm_mmcache.storage.encryption, vllm_mmcache.components.features.package, "
        "vllm_mmcache.components.features.message, vllm_mmcache.base.worker_threads"
    )
    assert not found & {"torch", "numpy", "vllm", "redis", "pydantic", "safetensors"}
    found = loaded_by(
        "vllm_mmcache.storage.open, vllm_mmcache.storage.redis_backend, vllm_mmcache.components.features.tiers"
    )
    assert not found & {"torch", "numpy", "vllm", "safetensors"}
    found = loaded_by("vllm_mmcache.storage.sqlite, vllm_mmcache.components.lazy_media.media_info")
    assert not found & {"torch", "numpy", "vllm", "redis", "safetensors", "PIL"}
    found = loaded_by("vllm_mmcache.components.features.engine.store, vllm_mmcache.storage.files")
    assert not found & {"torch", "vllm", "redis"}
    found = loaded_by(
        "vllm_mmcache.components.features.engine.transfers, vllm_mmcache.components.features.worker.device_copies"
    )
    assert not found & {"vllm", "redis"}


@pytest.mark.process
def test_reading_records_and_templates_needs_no_vllm() -> None:
    record = "vllm_mmcache.components.observe.record"
    found = loaded_by(f"{record}.reader, {record}.text, vllm_mmcache.components.observe.page.web")
    assert not found & {"torch", "vllm", "transformers", "numpy", "fastapi"}
    found = loaded_by("mmcache_tools.lint.check, mmcache_tools.lint.template")
    assert not found & {"torch", "vllm", "transformers", "jinja2", "pydantic"}


@pytest.mark.process
def test_estimates_need_no_vllm() -> None:
    found = loaded_by("vllm_mmcache.cli.estimate, vllm_mmcache.traffic.report, vllm_mmcache.traffic.logs")
    assert not found & {"torch", "vllm", "transformers", "numpy", "openai", "redis"}
    found = loaded_by("vllm_mmcache.batch.ray_worker, vllm_mmcache.batch.source")
    assert not found & {"torch", "vllm", "transformers", "numpy", "ray", "fsspec"}
