# SPDX-License-Identifier: Apache-2.0
"""Which components gave a request something that they had made, and which requests are not users'. Engine process.

A component notes it on vLLM's request, at most once for each, and only where the audit of live traffic asks (the
setting audit). A request of the plugin's own is passed over by whatever learns from requests. Imports no vLLM.
"""

from typing import Any, Literal

_USES = "_mmcache_uses"
_RUN = "_mmcache_run"

Run = Literal["", "warm", "cold", "features", "trial"]
"""A user's request; the audit's: with all that is cached, with nothing, with images' features alone; the trial's."""

_is_wanted = False


def want() -> None:
    """Have uses noted from now on."""
    global _is_wanted
    _is_wanted = True


def note(request: Any, component: str) -> None:
    """A component gave the request something that it had made."""
    if _is_wanted:
        request.__dict__.setdefault(_USES, set()).add(component)


def of(request: Any) -> frozenset[str]:
    """The components that gave a request something."""
    return frozenset(request.__dict__.get(_USES, ()))


def mark(request: Any, run: Run) -> None:
    """The request is one of the plugin's own: of the audit, or of the trial at start."""
    setattr(request, _RUN, run)


def run_of(request: Any) -> Run:
    """Which of the plugin's own it is; empty for a user's."""
    found: Run = getattr(request, _RUN, "")
    return found
