# SPDX-License-Identifier: Apache-2.0
"""A trap for runs of the vision tower where none may be, as where an image's features are there. Worker process.

The model classes of this package spring it before their tower runs, whoever calls them. A test has it raise; a trial
on a user's engine has it count, since an error within a step would take the engine with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class TowerRan(AssertionError):
    """The vision tower was to run where it may not."""


_may_run = True
_num_runs = 0


@contextmanager
def no_tower() -> Iterator[None]:
    """Within the block a run of the tower raises TowerRan, in this process."""
    global _may_run
    before, _may_run = _may_run, False
    try:
        yield
    finally:
        _may_run = before


def spring(model_class: str) -> None:
    """The tower of a model of this class is about to run. Raises: TowerRan."""
    global _num_runs
    if not _may_run:
        raise TowerRan(f"the vision tower of {model_class} was to run, and the features of all images are there")
    _num_runs += 1


def num_runs() -> int:
    """How often towers have run in this process, through the classes of this package."""
    return _num_runs
