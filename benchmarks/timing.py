# SPDX-License-Identifier: Apache-2.0
"""Median seconds of pieces of work that are done in turn, in one process."""

import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Action = Callable[[], object]


def medians(
    work: Mapping[Name, Callable[[], Action]],
    rounds: int,
    warm_up: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, float]:
    """By name. Each piece gives, for each round, what is then timed; rounds of the warm-up are not counted."""
    seconds: dict[Name, list[float]] = {name: [] for name in work}
    for number in range(warm_up + rounds):
        for name, prepare in work.items():
            action = prepare()
            start = clock()
            action()
            spent = clock() - start
            if number >= warm_up:
                seconds[name].append(spent)
    return {name: median(found) for name, found in seconds.items()}
