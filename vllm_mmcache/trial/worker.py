# SPDX-License-Identifier: Apache-2.0
"""What a trial asks of an engine's workers. Worker process; each function gets vLLM's worker, and is sent by name."""

from typing import Any

from vllm_mmcache.metrics import counters
from vllm_mmcache.models import tower_trap

_kept: Any = None


def tower_images(worker: Any) -> int:
    """Images that this worker's vision tower has run for since it started."""
    return int(counters.TOWER_IMAGES.value)


def tower_runs(worker: Any) -> int:
    """How often this worker's vision tower has run, whoever called it; 0 where the model's class does not tell."""
    return tower_trap.num_runs()


def keep_counts(worker: Any) -> None:
    """Keep what is counted now, for `restore_counts`."""
    global _kept
    _kept = counters.snapshot()


def restore_counts(worker: Any) -> None:
    """What was counted since `keep_counts` was not."""
    global _kept
    if _kept is not None:
        counters.restore(_kept)
        _kept = None
