# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` and `make gpu-ship`: what is exact on a GPU, and how that is found out where there is no network.

The interpreter that has vLLM for CUDA has nothing of this repository installed: both packages are read from here.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2] / "tools"))
