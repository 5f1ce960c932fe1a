# SPDX-License-Identifier: Apache-2.0
"""What comes of an error in our own code: one in bookkeeping fails no request, one in joint work ends the engine.

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

    vLLM awaits the answer of some ranks only, and an error on another one is lost. The others would then wait in an
    all-reduce for this rank, or be joined in it by this rank's next step, and give wrong numbers. Main thread only.
    Raises: SystemExit.
    """
    try:
        yield
    except Exception as error:
        logger.exception("mmcache: %s failed on this rank, and the engine can't go on without it", component)
        raise SystemExit(f"mmcache: {component}: {error}") from error
