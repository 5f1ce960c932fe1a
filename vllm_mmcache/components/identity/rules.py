# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of this component. Any process, at start."""

from typing import Any

from vllm_mmcache.base.status import State


def state_in(vllm_config: Any) -> State | None:
    """Identity has nothing to do in a model without images."""
    is_multimodal = vllm_config.model_config.multimodal_config is not None
    return None if is_multimodal else State("unneeded", "this model takes text alone")
