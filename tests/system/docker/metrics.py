# SPDX-License-Identifier: Apache-2.0
"""What the tests of alerts and dashboard share: promtool, and the metrics that there are."""

import re
import subprocess
from typing import Any

from tests.support.programs import program
from vllm_mmcache.metrics import counters, table_sizes


def promtool(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def exposed() -> set[str]:
    """The names of all samples of ours on /metrics, as the code makes them."""
    every: tuple[Any, ...] = (*counters.COUNTERS, *counters.TIER_COUNTERS.values(), *counters.RECORD_COUNTERS.values())
    labelled = (counters.PROMPT_TOKENS, counters.PROMPT_IMAGES, counters.AUDIT, counters.FILE_REQUESTS)
    names = {f"{counter.name}_total" for counter in (*every, *labelled)}
    names |= {gauge.name for gauge in vars(counters).values() if isinstance(gauge, counters.Gauge | counters.Info)}
    return names | {f"{prefix}_{what}" for prefix in ("table", "engine_table") for what in table_sizes._MEANINGS}


def named(*expressions: str) -> set[str]:
    return set(re.findall(r"mmcache:(\w+)", " ".join(expressions)))
