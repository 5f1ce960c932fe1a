# SPDX-License-Identifier: Apache-2.0
"""What a trial asks of an engine's workers. Worker process; each function gets vLLM's worker, and is sent by name."""

from typing import Any

from vllm_mmcache.base.errors import one_line
from vllm_mmcache.metrics import counters, transport
from vllm_mmcache.models import tower_trap
from vllm_mmcache.reference_attention.comparison import Comparison, unread

PROBE = "trial"
"""A counter that `keep_counts` raises by one and nobody shows: do workers' counts reach the engine's statistics?"""

_kept: Any = None
_comparison: Comparison | None = None
_why_not = ""


def tower_images(worker: Any) -> int:
    """Images that this worker's vision tower has run for since it started."""
    return int(counters.TOWER_IMAGES.value)


def tower_runs(worker: Any) -> int:
    """How often this worker's vision tower has run, whoever called it; 0 where the model's class does not tell."""
    return tower_trap.num_runs()


def compare_attention(worker: Any, spans: list[tuple[int, int]]) -> None:
    """From now on, compare rows of steps with the naive attention; spans are those of the request that runs alone.

    Where the layers can't be watched, nothing is compared, and `attention_compared` says why.
    """
    global _comparison, _why_not
    attention_compared(worker)  # ends one that runs
    try:
        _comparison = Comparison(worker.model_runner, spans)
    except Exception as error:  # of a runner or a backend that has other parts; it must not end the trial
        _why_not = one_line(error)


def attention_compared(worker: Any) -> dict[str, Any] | None:
    """End the comparison, and return what it has seen since `compare_attention`; None if none was begun."""
    global _comparison, _why_not
    comparison, _comparison = _comparison, None
    reason, _why_not = _why_not, ""
    if comparison is not None:
        return comparison.end()
    return unread(reason) if reason else None


def keep_counts(worker: Any) -> None:
    """Keep what is counted now, for `restore_counts`; and count PROBE."""
    global _kept
    _kept = counters.snapshot()
    transport.count(PROBE, 1)


def restore_counts(worker: Any) -> None:
    """Undo what was counted since `keep_counts`."""
    global _kept
    if _kept is not None:
        counters.restore(_kept)
        _kept = None
