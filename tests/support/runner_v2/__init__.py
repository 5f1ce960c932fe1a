# SPDX-License-Identifier: Apache-2.0
"""vLLM's second model runner (V2) on the CPU, for tests alone: its Triton kernels run in Triton's own interpreter.

vLLM takes V2 where Triton has a backend for the platform, and Triton has none for the CPU in its wheels. `on_path` is
a folder for PYTHONPATH with a stand-in of that name, which compiles nothing. Slow: six tokens take 1 to 8 seconds.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).with_name("on_path")


def environment(is_async: bool = False) -> dict[str, str]:
    """Variables for a new process whose engines run on V2. PYTHONPATH keeps what it has."""
    path = os.pathsep.join(part for part in (str(FOLDER), os.environ.get("PYTHONPATH", "")) if part)
    return {
        "PYTHONPATH": path,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TEST_ASYNC_SCHEDULING": str(int(is_async)),
    }
