# SPDX-License-Identifier: Apache-2.0
"""What comes of an error in our own code: bookkeeping fails no request, and a rank ends with all others.

Any process; imports no vLLM.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("vllm.mmcache")

_logged: set[str] = set()


class failsafe:  # noqa: N801 -- a context manager, as those of contextlib
    """Our own bookkeeping: an error in it is logged once per component and never fails a request."""

    __slots__ = ("component",)

    def __init__(self, component: str) -> None:
        self.component = component

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        if self.component not in _logged:
            _logged.add(self.component)
            logger.error("mmcache: bookkeeping of %s failed; requests go on without it", self.component, exc_info=error)
        return True


@contextmanager
def ends_rank(component: str) -> Iterator[None]:
    """Around a rank's part of what several ranks do together: an error ends its process, and so the engine.

    vLLM drops the error of a rank whose answer it does not wait for. The others would then wait in their next
    all-reduce, or take what this rank computes in its next step for what they wait for. Raises: SystemExit.
    """
    try:
        yield
    except Exception as error:
        logger.exception("mmcache: %s failed on this rank, and the engine can't go on without it", component)
        raise SystemExit(f"mmcache: {component}: {error}") from error
