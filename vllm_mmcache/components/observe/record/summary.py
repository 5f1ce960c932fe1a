# SPDX-License-Identifier: Apache-2.0
"""A record in short: what the page's list and charts and `mmcache explain` show of a request before it is opened."""

from collections import Counter
from typing import Any

from vllm_mmcache.components.observe.record.schema import Record


def summary(record: Record) -> dict[str, Any]:
    """Plain data. reason: the one with the most tokens that were not reused, None where all were."""
    missed: Counter[str] = Counter()
    for miss in record.misses:
        missed[str(miss.reason)] += miss.tokens
    tiers = Counter(segment.image.features for segment in record.segments if segment.image)
    return {
        "id": record.id,
        "request_id": record.request_id,
        "time_s": record.time_s,
        "server": record.server,
        "model": record.model,
        "prompt_tokens": record.prompt_tokens,
        "reused_tokens": record.reused_tokens,
        "missed_tokens": dict(missed),
        "images": dict(tiers),
        "reason": max(missed, key=lambda reason: missed[reason]) if missed else None,
    }
