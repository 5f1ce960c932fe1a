# SPDX-License-Identifier: Apache-2.0
"""What Triton looks for in a backend. It is imported with Triton, so it also arranges for what is cured elsewhere."""

from typing import Any

import wrapt
from triton.backends.compiler import BaseBackend, GPUTarget

from interpreted_cpu import async_scheduling, bfloat16

wrapt.when_imported("triton.runtime.interpreter")(bfloat16.calculate_in_float32)
wrapt.when_imported("vllm.platforms.cpu")(async_scheduling.keep)


@wrapt.when_imported("vllm.model_executor.models.qwen3_vl")
def interpolate_in_torch(module: Any) -> None:
    """Qwen3-VL's tower takes vLLM's other form of its one kernel: interpreted, it is seconds for each image."""
    module.HAS_TRITON = False


class InterpretedBackend(BaseBackend):
    """The backend of the target `cpu`."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("nothing is compiled for the CPU here: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = get_module_map = _refuse
    pack_metadata = get_codegen_implementation = _refuse
