# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention on the CPU, in Triton's interpreter: on CUDA it computes the images that attend both ways.

Needs a process of model runner V2 (tests/support/engine_configuration.py). Nothing of vLLM's attention is replaced: the
CPU platform grants TRITON_ATTN to who asks for it, and one question about the GPU's generation, put to size a tile, is
answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum

GENERATION = (9, 0)
ARGUMENTS = (("attention_backend", "TRITON_ATTN"), ("disable_chunked_mm_input", True))
"""Of an engine as CUDA has it: vLLM's CudaPlatform sets the second for every model whose images attend both ways."""


@contextmanager
def granted() -> Iterator[None]:
    """Engines that start meanwhile with ARGUMENTS take vLLM's Triton attention; they are asked meanwhile, too."""
    # Not above: it changes torch, and a run of the tests on V1 imports this module, too. Triton's interpreter knows no
    # barrier; vLLM makes it nothing on the CPU.
    import vllm.v1.worker.cpu.shm  # noqa: F401

    refuse = CpuPlatform.get_attn_backend_cls

    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if selected_backend is AttentionBackendEnum.TRITON_ATTN:
            return selected_backend.get_path()
        return refuse(selected_backend, *args, **kwargs)

    with (
        patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(get_attn_backend_cls)),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: GENERATION),
    ):
        selector._cached_get_attn_backend.cache_clear()
        try:
            yield
        finally:
            selector._cached_get_attn_backend.cache_clear()
