# SPDX-License-Identifier: Apache-2.0
"""Says on each request who has named its images: the component `identity`, a client, or nobody that is known.

Only a name that `identity` has given says what an image shows. `/inference/v1/generate` takes images as another server
has processed them, with their hashes, and whoever may ask it could give any hash any pixels. A server without
`identity` in front of an engine takes a client's uuid for a name. Features that are kept under a name live for days.

The mark travels with the request, among the arguments of its parameters that are for nobody else. It is of bytes, which
no JSON of a client can hold. API server process; the engine looks.
"""

from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

GIVEN: ContextVar[bool] = ContextVar("mmcache_processed_by_client", default=False)
"""Whether the body of the HTTP request that is being worked on brings processed images (its field `features`)."""

_going_past: WeakSet[Any] = WeakSet()  # output processors of engines whose renderers may name images by themselves
_MARK = "mmcache_image_namer"
_IDENTITY, _CLIENT = b"identity", b"client"


def goes_past(output_processor: Any) -> None:
    """Say that the renderer in front of an engine may name images without `identity`, so that none are marked so.

    output_processor: the one of vLLM that sees that engine's requests.
    """
    _going_past.add(output_processor)


def mark(request: Any, output_processor: Any = None) -> None:
    """Mark a request whose images `identity` or a client has named, whatever the client says. For use by `identity`."""
    if request.mm_features and (GIVEN.get() or output_processor not in _going_past):
        copy(_CLIENT if GIVEN.get() else _IDENTITY, request)


def copy(namer: bytes | None, request: Any) -> None:
    """Give a request the namer of another one."""
    name, params = _params_of(request)
    if params is not None and namer is not None:
        setattr(params, name, {**(getattr(params, name) or {}), _MARK: namer})


def of(request: Any) -> bytes | None:
    """Who has named the images of an engine's request; None where nobody says."""
    name, params = _params_of(request)
    namer = (getattr(params, name, None) or {}).get(_MARK)
    return namer if isinstance(namer, bytes) else None


def is_identity(request: Any) -> bool:
    """Whether the names of a request's images say what they show."""
    return of(request) == _IDENTITY


def is_client(request: Any) -> bool:
    """Whether a client has named the images of a request, which it has processed itself."""
    return of(request) == _CLIENT


def _params_of(request: Any) -> tuple[str, Any]:
    """Where a request's arguments for others are, and in which parameters."""
    if request.sampling_params is not None:
        return "extra_args", request.sampling_params
    return "extra_kwargs", request.pooling_params
