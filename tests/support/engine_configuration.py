# SPDX-License-Identifier: Apache-2.0
"""Which engine a run of the tests is about: vLLM's version, model runner and scheduling. All its engines are of that.

TEST_ENGINE chooses: `v1` (what vLLM takes on the CPU), `v2` and `v2-async` (what it takes on CUDA). The version is that
of the environment. Variables reach every process that a test starts, so servers and workers are of it, too.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support import runner_v2

if TYPE_CHECKING:
    from mmcache_tools.harness.engines import ZooRig


@dataclass(frozen=True)
class EngineConfiguration:
    """Model runner 1 or 2, and whether the next step is scheduled before the last one's tokens are known."""

    runner: int
    is_async: bool

    def environment(self) -> dict[str, str]:
        """Variables for a new process whose engines are of this configuration. PYTHONPATH keeps what it has."""
        if self.runner == 1:
            return {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        return runner_v2.environment(is_async=self.is_async)

    def apply(self) -> None:
        """To this process and those that it starts; before Triton is imported."""
        assert "triton" not in sys.modules, "too late: Triton has looked for its backends"
        os.environ |= self.environment()
        if self.runner == 2:
            sys.path.insert(0, str(runner_v2.FOLDER))

    def check(self, rig: ZooRig) -> None:
        """Assert that an engine is of this configuration; elsewhere than on the CPU it is what vLLM takes."""
        from vllm.platforms import current_platform
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        if not current_platform.is_cpu():
            return
        vllm_config = rig.llm.llm_engine.vllm_config
        assert vllm_config.use_v2_model_runner == (self.runner == 2)
        assert issubclass(vllm_config.scheduler_config.get_scheduler_cls(), AsyncScheduler) == self.is_async
        if rig.runner is not None:
            assert type(rig.runner).__module__.startswith("vllm.v1.worker.cpu.") == (self.runner == 2)

    def __str__(self) -> str:
        return f"model runner V{self.runner}, {'async' if self.is_async else 'synchronous'} scheduling"


CONFIGURATIONS = {
    "v1": EngineConfiguration(1, is_async=False),
    "v2": EngineConfiguration(2, is_async=False),
    "v2-async": EngineConfiguration(2, is_async=True),
}
CHOSEN = CONFIGURATIONS[os.environ.get("TEST_ENGINE", "v1")]
