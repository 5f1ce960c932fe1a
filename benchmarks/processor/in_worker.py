# SPDX-License-Identifier: Apache-2.0
"""Loads the probe in the worker: vLLM imports this module there, and nowhere else."""

from benchmarks.processor import probe

probe.install(probe.WORKER)


class Extension:
    """Adds nothing to the worker."""
