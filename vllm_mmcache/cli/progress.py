# SPDX-License-Identifier: Apache-2.0
"""What a terminal sees while a command works; nothing where stderr goes elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show `what` with a spinner on the terminal of stderr, until the block ends."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True, markup=False).status(what):
        yield
