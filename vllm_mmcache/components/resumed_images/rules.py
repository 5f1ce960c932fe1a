# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of this component. Any process, at start."""

from typing import Any

from vllm_mmcache.base.status import State


def state_in(vllm_config: Any) -> State | None:
    """Only model runner V1 goes on with a request without its images."""
    if vllm_config.use_v2_model_runner:
        return State("unneeded", "model runner V2 is sent a resumed request as a new one, images included")
    return None
