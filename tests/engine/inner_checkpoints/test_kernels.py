# SPDX-License-Identifier: Apache-2.0
"""The kernels of GDN that CUDA has are cut as the core on the CPU is, in Triton's interpreter.

The engine is the CPU's; its core is replaced by the method that CUDA calls, convolution and recurrence in Triton.
"""

from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from tests.engine.inner_checkpoints.test_inner_checkpoints import QWEN, ask, end_of_last_image, watch
from vllm_mmcache.base import status
from vllm_mmcache.components.inner_checkpoints import vllm_gdn
from vllm_mmcache.prove.answers import assert_equals_answer
from vllm_mmcache.prove.conversations import filler, picture

pytestmark = [pytest.mark.engine, pytest.mark.interpreter]

SMALL = (224, 224)
PARTS = [filler(130), picture(1, SMALL), filler(190)]


@pytest.mark.parametrize("config", [QWEN], ids=["qwen3.5"])
def test_states_inside_a_chunk_with_the_kernels(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is that of uncut kernels, and the second, from the state that was kept, that of a cold run."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def kernels(layer: Any, metadata: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        layer._forward_core(mixed_qkv, b, a, core_attn_out)

    rig = pool.get(config)
    steps, parts = watch(rig, monkeypatch), []
    part_for = vllm_gdn.part_for_kernels
    monkeypatch.setattr(gdn_attention, "_cpu_gdn_attention_nonspec", kernels)
    monkeypatch.setattr(vllm_gdn, "part_for_kernels", lambda *args: parts.append(args) or part_for(*args))
    monkeypatch.setitem(status._is_on, "image_checkpoints", False)
    stock = ask(rig, PARTS)
    monkeypatch.setitem(status._is_on, "image_checkpoints", True)
    rig.make_cold()
    first, second = ask(rig, PARTS), ask(rig, PARTS, 1)
    assert steps.take().cuts == 1
    assert len(parts) == 2 * 3, "two pieces in each of three groups"
    assert second.num_cached_tokens == end_of_last_image(rig, second) > 0
    assert_equals_answer(first, stock, rig.tolerance, "uncut kernels")
    rig.assert_exact([first, second])
