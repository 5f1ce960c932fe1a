# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's processors make of an image what they make of it beside others."""

from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.model_executor.models import nano_nemotron_vl
from vllm.model_executor.models.deepseek_vl2 import DeepseekVL2MultiModalProcessor
from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor, Qwen3VLProcessingInfo

from vllm_mmcache.components.lazy_processing.vllm_processor import is_for_one


def made(processor_class: Any, info_class: Any, **said: bool) -> Any:
    """A processor without a model."""
    assert all(hasattr(info_class, name) for name in said), "vLLM has another name for it"
    processor: Any = processor_class.__new__(processor_class)
    processor.info = info_class.__new__(info_class)
    vars(processor.info).update(said)
    return processor


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_images_that_share_the_tokens_of_a_prompt(is_dynamic: bool) -> None:
    processor_class = nano_nemotron_vl.NanoNemotronVLMultiModalProcessor
    processor = made(processor_class, nano_nemotron_vl.NanoNemotronVLProcessingInfo, is_dynamic_tiler=is_dynamic)
    assert is_for_one(processor) == (not is_dynamic)


def test_a_processor_that_goes_past_the_cache_by_the_number_of_images() -> None:
    assert is_for_one(made(Qwen3VLMultiModalProcessor, Qwen3VLProcessingInfo))
    assert not is_for_one(made(DeepseekVL2MultiModalProcessor, Qwen3VLProcessingInfo))


@pytest.mark.parametrize("name", ["KimiK25FusedVisionProcessor", "Another"])
def test_an_image_processor_that_two_threads_may_not_run_at_once(name: str) -> None:
    """Kimi-K3's is parallel code of Numba's, under a threading layer that ends the process then.

    Its module is not imported: with Numba in its process, vLLM 0.32 can make no engine on a CPU.
    """
    where = Path(vllm.__file__).parent / "transformers_utils" / "processors" / "kimi_k25_vision_fused.py"
    assert "class KimiK25FusedVisionProcessor" in where.read_text(), "vLLM has another name for it"
    processor = made(Qwen3VLMultiModalProcessor, Qwen3VLProcessingInfo)
    processor.info.image_processor = type(name, (), {})()
    assert is_for_one(processor) == (name == "Another")
