# SPDX-License-Identifier: Apache-2.0
"""What a step of the engine costs before its first token, in tokens of a prefill, from the times of steps. Pure.

A step takes a fixed time and a time for each token. Their proportion is what a checkpoint is charged with that adds a
step: a step that costs 150 tokens is worth it where more than 150 tokens are expected to be saved. Not thread-safe: the
scheduler's thread alone.
"""

from dataclasses import dataclass

ASSUMED_TOKENS = 150.0
"""While nothing is measured: that of a model of 9 billion parameters, by calculation."""
LEAST_TOKENS, MOST_TOKENS = 16.0, 2000.0  # a fit beyond them is noise
FIRST_STEPS = 16  # until then, what is assumed holds
WEIGHT = 1 / 64  # of the newest step
SPREAD = 0.25  # the least deviation of the steps' tokens, as a share of their mean, that says something of a slope


@dataclass
class StepCost:
    """A line through the times of steps by their tokens, the newer ones weighing more."""

    steps: int = 0
    _tokens: float = 0.0  # means, and means of squares and products
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds. What is not positive tells nothing."""
        if tokens <= 0 or seconds <= 0:
            return
        self.steps += 1
        weight = max(WEIGHT, 1 / self.steps)
        self._tokens += (tokens - self._tokens) * weight
        self._seconds += (seconds - self._seconds) * weight
        self._squares += (tokens * tokens - self._squares) * weight
        self._products += (tokens * seconds - self._products) * weight

    @property
    def tokens(self) -> float:
        """What a step costs beside its tokens, in tokens."""
        spread = self._squares - self._tokens**2
        if self.steps < FIRST_STEPS or spread < (SPREAD * self._tokens) ** 2:
            return ASSUMED_TOKENS
        for_token = (self._products - self._tokens * self._seconds) / spread
        if for_token <= 0:
            return ASSUMED_TOKENS
        fixed = self._seconds - for_token * self._tokens
        return min(max(fixed / for_token, LEAST_TOKENS), MOST_TOKENS)
