# SPDX-License-Identifier: Apache-2.0
"""Items of one run, each held against stock vLLM on the same engine. The command's own process, which loads no vLLM."""

import dataclasses
import math
import time
from typing import Any

from vllm_mmcache.prove import items
from vllm_mmcache.prove.items import RESULT, Item, RunOptions


class Runs:
    """Runs items, and knows what stock said. `end_s` is a time of time.monotonic(), after which nothing is started."""

    def __init__(self, how: RunOptions, end_s: float = math.inf) -> None:
        self.how = how
        self.end_s = end_s
        self.stocks: dict[Any, RESULT] = {}  # setting -> what stock said

    def run(self, item: Item) -> RESULT:
        """One item's result; its stock item comes before it. Raises: OutOfTime."""
        outcome = items.run(item, self.how, self.stocks.get(item.setting), self._left())
        if not item.components:
            self.stocks[item.setting] = outcome
        elif outcome["state"] == "failed" and "engine" not in outcome and item.setting not in self.stocks:
            # Was it the plugin? Stock on the same engine tells.
            bare = dataclasses.replace(item, components=(), together=False)
            stock = items.run(bare, dataclasses.replace(self.how, short=True), None, self._left())
            if "engine" not in stock:
                outcome = items.unrunnable(stock)
        return outcome

    def _left(self) -> float:
        return self.end_s - time.monotonic()
