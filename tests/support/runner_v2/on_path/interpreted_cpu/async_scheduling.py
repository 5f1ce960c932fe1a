# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform switches async scheduling off ("not required on CPU"), after everything else has decided.

With TEST_ASYNC_SCHEDULING=1 what was decided before stays, as on CUDA.
"""

import os
from typing import Any


def keep(platform: Any) -> None:
    """Let `vllm.platforms.cpu` leave async scheduling as it finds it."""
    cpu = platform.CpuPlatform
    check = cpu.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    if os.environ.get("TEST_ASYNC_SCHEDULING") == "1":
        cpu.check_and_update_config = classmethod(check_and_update_config)
