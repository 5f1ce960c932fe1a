# SPDX-License-Identifier: Apache-2.0
"""Finds and repairs what keeps a CPU vLLM from starting in this Python environment.

Runs on the command line only (`python -m vllm_mmcache.environment`, and the verbs of `mmcache` that start vLLM, before
they do), never inside a server.
Where pip finds only CUDA builds of torchvision, torchaudio and torchcodec beside a CPU torch, importing them
raises, and vLLM dies in the middle of transformers. Each check is a real import in a subprocess of its own,
so that what it says is what a server would meet. Nothing outside the environment's own site-packages is
touched.
"""

from vllm_mmcache.environment.checks import Problem, diagnose
from vllm_mmcache.environment.repair import check, is_stamped, problems, repair, take_back, to_forget_written

__all__ = ["Problem", "check", "diagnose", "is_stamped", "problems", "repair", "take_back", "to_forget_written"]
