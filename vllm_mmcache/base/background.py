# SPDX-License-Identifier: Apache-2.0
"""Threads that work for others in the background stay out of the way of the one that serves. Any process.

vLLM binds the thread that computes to some cores, and threads that it starts inherit that; so a background thread takes
the other ones of those that the process had when the plugin was registered, and only what the others leave of them:
where vLLM computes on every core, as on the CPU, a thread of equal rank that is busy stops its steps for many
milliseconds. Where cores are idle it is as fast.
"""

import contextlib
import os
import threading

_LOWEST = 19

_cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset[int]()


def cores() -> frozenset[int]:
    """Those that the process's main thread is not bound to; all, where it is bound to none or to each of them."""
    with contextlib.suppress(OSError, AttributeError):
        return frozenset(_cores - os.sched_getaffinity(threading.main_thread().native_id or 0) or _cores)
    return frozenset(_cores)


def busy_thread_limit(most: int) -> int:
    """How many threads may be busy beside the one that serves: one for two cores, at least one, at most `most`."""
    return max(1, min(most, len(cores()) // 2))


def lower_priority() -> None:
    """To be called by a background thread when it starts. Where the system does not allow it, nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, cores())
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
