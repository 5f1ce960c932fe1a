# SPDX-License-Identifier: Apache-2.0
"""Keeps our own bookkeeping from failing a request. Any process; imports no vLLM."""

import logging

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
