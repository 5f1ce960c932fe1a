# SPDX-License-Identifier: Apache-2.0
"""Attention that can't, a model that is not known, an image longer than the window or the step: an error at start.

Each case starts a real engine in a process of its own and must not get past the start.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mmcache_tools.zoo import ZooOptions, build_cached

from tests.support.sizes import larger

pytestmark = pytest.mark.engine

START = """
from vllm_mmcache.plugin import register
register()
{before}
from vllm import LLM
llm = LLM({model!r}, enforce_eager=True, block_size=32, max_model_len=512, dtype="float32", {more})
print("model:", type(llm.llm_engine.model_executor.driver_worker.worker.model_runner.model).__name__)
"""


def start(model: Path, before: str = "", more: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and output of a process that starts an engine."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
    environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", START.format(before=before, model=str(model), more=more)],
        env=environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_stock_backend_is_refused(tmp_path: Path) -> None:
    model = build_cached("gemma3", tmp_path)
    stock = (
        "from vllm_mmcache.components.image_spans.vllm_backend import ImageSpanBackend\n"
        "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend\n"
        "ImageSpanBackend.supports_mm_prefix = CPUAttentionBackend.supports_mm_prefix"
    )
    code, said = start(model, before=stock)
    assert code != 0
    assert "CausalImages: attention backend CPU_ATTN" in said
    assert "MMCACHE_ALLOW_CAUSAL_IMAGES=1" in said
    code, said = start(model, before=stock, MMCACHE_ALLOW_CAUSAL_IMAGES="1")
    assert code == 0, said[-2000:]
    assert "model: Gemma3ForConditionalGeneration" in said


def test_image_longer_than_the_window_is_refused(tmp_path: Path) -> None:
    model = build_cached("gemma3", tmp_path, options=ZooOptions(sliding_window=32))
    code, said = start(model)
    assert code != 0
    assert "CausalImages: an image has 64 tokens" in said


@larger
def test_paligemma_is_refused(tmp_path: Path) -> None:
    """Its whole prompt attends both ways, which vLLM runs nowhere."""
    model = build_cached("paligemma", tmp_path)
    code, said = start(model)
    assert code != 0
    assert "CausalImages: images of a paligemma model attend both ways" in said
    assert "the whole prompt attends both ways" in said
    code, said = start(model, MMCACHE_ALLOW_CAUSAL_IMAGES="1")
    assert code == 0, said[-2000:]
    code, said = start(model, more='limit_mm_per_prompt={"image": 0}')
    assert code == 0, said[-2000:]  # text alone, which vLLM does not mark


@pytest.mark.parametrize(
    "more",
    ["max_num_batched_tokens=48, max_num_seqs=4", pytest.param("long_prefill_token_threshold=40", marks=larger)],
)
def test_image_longer_than_a_step_is_refused(tmp_path: Path, more: str) -> None:
    code, said = start(build_cached("gemma3", tmp_path), more=more)
    assert code != 0
    assert "every image of this model has 64 tokens that must be computed in one step" in said
