# SPDX-License-Identifier: Apache-2.0
"""What vLLM and Triton ask of a driver: that it is there, and which device it has."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class _Utils:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"multiprocessor_count": 1, "max_shared_mem": 1 << 20, "warpSize": 1}


class InterpretedDriver(DriverBase):
    """One device, the CPU."""

    utils = _Utils

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is timed")
