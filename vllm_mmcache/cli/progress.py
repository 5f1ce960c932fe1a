# SPDX-License-Identifier: Apache-2.0
"""What a terminal sees while a command works; nothing where stderr is none."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on the terminal of stderr that something is being done, until the block ends."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
