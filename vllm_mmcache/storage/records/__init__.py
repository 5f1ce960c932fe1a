# SPDX-License-Identifier: Apache-2.0
"""What was learned of images and videos, stored under a key of everything that it depends on. API server process.

A record is a few hundred bytes that save decoding an image, or a run of vLLM's processor. It is kept in RAM, in the
store's directory and in Redis or Valkey, so that it is found after a restart and by other servers. Whatever goes wrong
is a miss: asking never raises, and whoever asks can always do the work again.
"""

import atexit
import os
import threading

from vllm_mmcache.base import settings
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.storage.frame import MAX_VALUE_BYTES, key
from vllm_mmcache.storage.records.records import RENEW_S, Records

__all__ = ["MAX_VALUE_BYTES", "RENEW_S", "Records", "close", "current", "key"]

_current: tuple[Settings, Records] | None = None
_opening = threading.Lock()


def current() -> Records:
    """The records of this process, opened on first use by the settings in force. Any thread; never raises."""
    global _current
    chosen = settings.current()
    opened = _current
    if opened is not None and opened[0] is chosen:
        return opened[1]
    with _opening:
        opened = _current
        if opened is None or opened[0] != chosen:
            if opened is not None:
                opened[1].close()
            opened = chosen, Records.of(chosen)
        _current = chosen, opened[1]
        return opened[1]


def close() -> None:
    """Write what is waiting, and let go of files and memory; the next `current` opens them anew."""
    global _current
    with _opening:
        opened, _current = _current, None
    if opened is not None:
        opened[1].close()


def _after_fork() -> None:
    """A child has records of its own: connections and threads don't survive a fork."""
    global _current, _opening
    _current, _opening = None, threading.Lock()


# A thread that works while the interpreter ends can take the process down.
atexit.register(close)
os.register_at_fork(after_in_child=_after_fork)
