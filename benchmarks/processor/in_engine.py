# SPDX-License-Identifier: Apache-2.0
"""Loads the probe in the engine: vLLM asks this module for its scheduler there, and gets its own."""

from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.processor import probe

__all__ = ["Scheduler"]

probe.install(probe.ENGINE)
