# SPDX-License-Identifier: Apache-2.0
"""Whether a tier is worth asking: what loading from it has taken so far beside what the vision tower takes.

On a GPU the tower makes an image's features in milliseconds, faster than many a disk or network gives them. So each
tier is measured, and one that would be slower than the tower is left alone but for a load now and then, which shows
when it has become faster. Engine process; no torch.
"""

import math
import time
from collections.abc import Callable, Iterable
from enum import Enum

from vllm_mmcache.base.estimate import Estimate
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.tier_counts import TierCounts

PROBE_EVERY_S = 30.0
UNKNOWN_TOWER_S = 0.05
"""How long a request is held back while nobody has timed the tower: about what a large one takes on a GPU."""


class TierChoice(Enum):
    """How to ask a tier for one package."""

    WAIT = "wait"
    """Ask it, and hold the request back until it has answered, within `CostModel.max_wait_s`."""
    PROBE = "probe"
    """Ask it in the background, to measure it; the request goes on and the tower runs."""
    SKIP = "skip"
    """The tower is faster."""


class CostModel:
    """Decides for each package how to ask a tier for it. Engine process: one thread asks, any thread tells `loaded`.

    tower: seconds of the vision tower by tokens, None while unknown. patience_s: how long the operator lets a request
    wait for its packages, None to go by the tower's time; where it is set, every tier is waited for. counts: those of
    the tiers, which get the decisions, too.

    The estimates are for one image. Several images of a request load at once and share the bandwidth, so each takes
    longer, and the tower takes longer for all of them, too: the comparison holds about as well for one as for many.
    """

    def __init__(
        self,
        tower: Callable[[int], float | None],
        patience_s: float | None,
        counts: Iterable[TierCounts] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tower = tower
        self._max_wait_s = patience_s
        self._counts = {one.tier: one for one in counts}
        self._clock = clock
        self._loads: dict[str, Estimate] = {}
        self._measured_at: dict[str, float] = {}  # by tier, when it was last measured, or is being measured

    def loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A package of `num_bytes` took `seconds` to load from a tier. Any thread."""
        self._measured_at[tier] = self._clock()  # first: `ask` looks at it for every tier that has loads
        self._loads.setdefault(tier, Estimate()).add(num_bytes, seconds)

    def load_s(self, tier: str, num_bytes: int) -> float | None:
        """Seconds to load `num_bytes` from a tier, as far as is known."""
        return self._loads[tier].seconds(num_bytes) if tier in self._loads else None

    def ask(self, tier: str, num_tokens: int, num_bytes: int, pixels_s: float = 0.0) -> TierChoice:
        """How to ask a tier for the package of an image: `num_bytes`, or `num_tokens` in the tower. Counted.

        pixels_s: what comes before the tower, where the image has no pixels yet; infinite where that is not known.
        """
        load_s, tower_s = self.load_s(tier, num_bytes), self._tower_s(num_tokens, pixels_s)
        ask = TierChoice.WAIT
        if load_s is not None and tower_s is not None:
            if self._max_wait_s is None and load_s > tower_s:
                ask = self._probe_or_skip(tier)
            self._count(tier, not_asked=ask is TierChoice.SKIP, expected_load_s=load_s, expected_tower_s=tower_s)
        return ask

    def max_wait_s(self, num_tokens: int, pixels_s: float = 0.0) -> float:
        """Seconds that a request may be held back for packages that the tower would make of `num_tokens` in all."""
        if self._max_wait_s is not None:
            return self._max_wait_s
        tower_s = self._tower_s(num_tokens, pixels_s)
        return UNKNOWN_TOWER_S if tower_s is None else tower_s

    def wait_until(self, latest: float, num_tokens: int, pixels_s: float = 0.0) -> float:
        """When a request shall go on without a package for which it begins to wait; by `time.monotonic`.

        latest: when it goes on without those before it, which the same tower would have to make, one after the other.
        """
        now = time.monotonic()
        begin = now if self._max_wait_s is not None else max(now, latest)
        return begin + self.max_wait_s(num_tokens, pixels_s)

    def _tower_s(self, num_tokens: int, pixels_s: float) -> float | None:
        tower_s = self._tower(num_tokens)
        return None if tower_s is None or pixels_s == math.inf else tower_s + pixels_s

    def _probe_or_skip(self, tier: str) -> TierChoice:
        now = self._clock()
        if now - self._measured_at[tier] < PROBE_EVERY_S:
            return TierChoice.SKIP
        self._measured_at[tier] = now
        return TierChoice.PROBE

    def _count(self, tier: str, **amounts: float) -> None:
        self._counts.setdefault(tier, TierCounts(FEATURES, tier)).add(**amounts)
