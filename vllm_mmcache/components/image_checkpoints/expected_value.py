# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint that costs something is expected to pay: how often such are reused, by what one saves. Pure.

A checkpoint of a Mamba model can end a chunk of the prefill that would not end there, and in a full KV cache it
displaces what others would have reused. It saves its tokens if a later request resumes at it. How often that happens is
learned from requests, not from evictions: in a KV cache that never evicts, nothing else would tell that pictures never
come again. Whoever made no checkpoint learns as well, since vLLM says where one would have been used. Not thread-safe:
the scheduler's thread alone.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.components.image_checkpoints.positions import END, START, Checkpoint

WEIGHT = 1 / 16  # of the newest request in a rate
FORGOTTEN_AFTER = 32  # requests without a reuse, behind which a kind is not expected to be reused, whatever it saves
TRIED = {START: 8, END: 32}
"""First requests, whose likely checkpoints are made to find out. Fewer starts: vLLM itself keeps where requests part,
once two have, and a stop before an image changes what goes through the vision tower together."""
KNOWN_AFTER = 8  # requests, behind which a tenant's own rate counts
MOST_TENANTS = 4096
MOST_IMAGES = 16384
_ENTRY_BYTES = 400  # about


@dataclass
class Rate:
    """How often something is reused, by request."""

    value: float
    requests: int = 0
    silent: int = 0  # requests since the last reuse

    def record(self, share: float) -> None:
        """One more request that could have reused it, and this share of it was."""
        self.requests += 1
        self.value += (share - self.value) * WEIGHT
        self.silent = 0 if share else self.silent + 1

    def expected(self) -> float:
        """The share that is reused, from here on."""
        return self.value if self.silent < FORGOTTEN_AFTER else 0.0


class ReuseRates:
    """How often checkpoints are reused, by kind: those of an image, else of its tenant, else of all.

    A kind is the start or the end of an image, each by itself for the likely ones of a prompt and the others between
    them (Checkpoint.rated_as). Nothing is known at first: likely ones are tried, the others wait until one would have
    been used.
    """

    def __init__(self) -> None:
        self._all: dict[str, Rate] = {}
        self._tenants = _table(MOST_TENANTS)
        self._images = _table(MOST_IMAGES)

    def __len__(self) -> int:
        return len(self._tenants) + len(self._images)

    def record(self, salt: str, offered: Iterable[Checkpoint], reused: Checkpoint | None, image: str = "") -> None:
        """A request could have resumed at any of `offered`; at `reused` it did, or would have.

        image: the one whose end that is, if it is one's.
        """
        kinds = {kind for one in [*offered, *([reused] if reused else [])] for kind in one.rated_as}
        for kind in kinds:
            was_reused = reused is not None and kind in reused.rated_as
            self._of_all(kind).record(was_reused)
            tenant = self._tenants.get((kind, salt))
            if tenant is None:
                tenant = self._tenants.admit((kind, salt), Rate(self._of_all(kind).value))
            tenant.record(was_reused)
            if was_reused and image:
                self._images.replace((kind, salt, image), Rate(1.0))

    def expected(self, checkpoint: Checkpoint, salt: str, image: str = "") -> float:
        """The share of such checkpoints that are reused, by the narrowest that is known."""
        return max(self._expected(kind, salt, image) for kind in checkpoint.rated_as)

    def made(self, checkpoint: Checkpoint, salt: str, image: str) -> None:
        """One was made; at an image whose checkpoints were reused, it counts as unused until the next reuse."""
        for kind in checkpoint.rated_as:
            if (of_image := self._images.get((kind, salt, image))) is not None:
                of_image.record(0)

    def _expected(self, kind: str, salt: str, image: str) -> float:
        of_image = self._images.get((kind, salt, image))
        if of_image is not None:
            return of_image.expected()
        tenant, of_all = self._tenants.get((kind, salt)), self._of_all(kind)
        if of_all.silent == of_all.requests:  # none was reused so far
            return float(of_all.requests < TRIED.get(kind, 0))
        if tenant is not None and tenant.requests >= KNOWN_AFTER:
            return tenant.expected()
        return of_all.expected()

    def _of_all(self, kind: str) -> Rate:
        if kind not in self._all:  # there are four
            self._all[kind] = Rate(float(kind in TRIED))
        return self._all[kind]


def pays(rate: float, saved_tokens: float, cost_tokens: float) -> bool:
    """Whether what a checkpoint saves, by how often it is reused, is at least what it costs."""
    return rate * saved_tokens >= cost_tokens


@dataclass(frozen=True)
class Prefill:
    """How a prompt is computed from a prefix hit on: in chunks, which end at stops, and images in runs of the tower.

    budget_tokens: most of a chunk. images: (offset, length) of the placeholder ranges, in prompt order.
    """

    start: int
    end: int
    budget_tokens: int
    images: Sequence[tuple[int, int]] = ()

    def chunks(self, stops: Iterable[int]) -> list[tuple[int, int]]:
        """Start and end of each chunk."""
        found, start = [], self.start
        for stop in [*sorted({stop for stop in stops if self.start < stop < self.end}), self.end]:
            while start < stop:
                end = min(start + self.budget_tokens, stop)
                found.append((start, end))
                start = end
        return found

    def runs(self, stops: Iterable[int]) -> list[list[int]]:
        """The images of each run of the tower, by number: an image is encoded in the first chunk that needs it."""
        found, number = [], 0
        while number < len(self.images) and sum(self.images[number]) <= self.start:
            number += 1
        for _, end in self.chunks(stops):
            run = []
            while number < len(self.images) and self.images[number][0] < end:
                run.append(number)
                number += 1
            if run:
                found.append(run)
        return found

    def extra_steps(self, stops: Collection[int], more: int) -> int:
        """What a further stop costs, in steps: chunks more than without it; and one where images change their runs.

        0 where the end of a chunk only moves and every run of the tower stays what it is.
        """
        with_it = [*stops, more]
        steps = len(self.chunks(with_it)) - len(self.chunks(stops))
        return max(0, steps) + (self.runs(with_it) != self.runs(stops))


def _table(entries: int) -> LruTable[tuple[str, ...], Rate]:
    return LruTable(lambda: Budget(entries, entries * _ENTRY_BYTES), _ENTRY_BYTES)
