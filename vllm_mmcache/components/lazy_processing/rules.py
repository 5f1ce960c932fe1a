# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of this component. Any process, at start."""

from typing import Any

from vllm_mmcache.base.status import State


def state_in(vllm_config: Any) -> State | None:
    """Pixels are made by the processor at once where it works on a GPU."""
    device = vllm_config.model_config.multimodal_config.get_mm_processor_device_type()
    return State("off", f"images are processed on {device}") if device not in (None, "cpu") else None
