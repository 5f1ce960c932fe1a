# SPDX-License-Identifier: Apache-2.0
"""What a trial asks of an engine's workers. Worker process; each function gets vLLM's worker, and is sent by name."""

from typing import Any

from vllm_mmcache.metrics import counters
from vllm_mmcache.models import tower_trap
from vllm_mmcache.reference_attention.comparison import Comparison

_kept: Any = None
_comparison: Comparison | None = None


def tower_images(worker: Any) -> int:
    """Images that this worker's vision tower has run for since it started."""
    return int(counters.TOWER_IMAGES.value)


def tower_runs(worker: Any) -> int:
    """How often this worker's vision tower has run, whoever called it; 0 where the model's class does not tell."""
    return tower_trap.num_runs()


def compare_attention(worker: Any, spans: list[tuple[int, int]]) -> None:
    """From now on, compare rows of steps with the naive attention; spans are those of the request that runs alone."""
    global _comparison
    attention_compared(worker)
    _comparison = Comparison(worker.model_runner, spans)


def attention_compared(worker: Any) -> dict[str, Any] | None:
    """What was seen since `compare_attention`, which ends with this."""
    global _comparison
    comparison, _comparison = _comparison, None
    return comparison.end() if comparison is not None else None


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
