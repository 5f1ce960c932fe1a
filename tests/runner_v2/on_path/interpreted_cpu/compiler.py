# SPDX-License-Identifier: Apache-2.0
"""What Triton looks for in a backend. It is imported with Triton, so it also arranges for what is cured elsewhere."""

from typing import Any

import wrapt
from triton.backends.compiler import BaseBackend, GPUTarget

from interpreted_cpu import async_scheduling, bfloat16

wrapt.when_imported("triton.runtime.interpreter")(bfloat16.calculate_in_float32)
wrapt.when_imported("vllm.platforms.cpu")(async_scheduling.keep)


class InterpretedBackend(BaseBackend):
    """The backend of the target `cpu`."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("nothing is compiled for the CPU here: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = get_module_map = _refuse
    pack_metadata = get_codegen_implementation = _refuse
