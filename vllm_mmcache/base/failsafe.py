# SPDX-License-Identifier: Apache-2.0
"""Keeps our own bookkeeping from failing a request. Any process; imports no vLLM."""

import logging

logger = logging.getLogger("vllm.mmcache")

_logged: set[str] = set()


class guarded:  # noqa: N801 -- a context manager, as those of contextlib
    """Our own bookkeeping: an error in it is logged once per room and never fails a request."""

    __slots__ = ("room",)

    def __init__(self, room: str) -> None:
        self.room = room

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        if self.room not in _logged:
            _logged.add(self.room)
            logger.error("mmcache: bookkeeping of %s failed; requests go on without it", self.room, exc_info=error)
        return True
