# SPDX-License-Identifier: Apache-2.0
"""Counts the steps for which one request has found no room for its image, and says when it is its turn. Pure.

Running requests take their tokens first, so while many are running, a span that needs most of a step would wait until
they end. Others rest for one step out of FIRST_PATIENCE + 1 at most. Where that did not help, since what is missing is
room in a cache and not in the step, patience doubles up to LAST_PATIENCE, so that the others lose one step in 65.
"""

from collections.abc import Container

FIRST_PATIENCE = 4  # steps
LAST_PATIENCE = 64  # steps


class Waiting:
    """The request that waits, and for how many steps it has; one at a time, the first one that a step leaves out."""

    def __init__(self) -> None:
        self.request_id = ""
        self.num_steps = 0
        self.patience = FIRST_PATIENCE

    def is_due(self) -> bool:
        """Whether the next step is to be its own. Each turn that is taken doubles the patience."""
        if not self.request_id or self.num_steps < self.patience:
            return False
        self.num_steps = 0
        self.patience = min(2 * self.patience, LAST_PATIENCE)
        return True

    def stepped(self, blocked: str | None, scheduled: Container[str]) -> None:
        """After a step: the first request that it had no room for, and those that it computes."""
        if blocked is not None and blocked != self.request_id:
            self.request_id, self.num_steps, self.patience = blocked, 1, FIRST_PATIENCE
        elif blocked is not None:
            self.num_steps += 1
        elif self.request_id in scheduled:
            self.request_id = ""
