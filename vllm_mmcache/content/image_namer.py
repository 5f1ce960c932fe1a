# SPDX-License-Identifier: Apache-2.0
"""Says on each request who has named its images: the component `identity`, a client, or nobody that is known.

Only a name that the component `identity` has made, of an image's content, says what the image shows.
`/inference/v1/generate` takes images as another server has processed them, with their hashes, and whoever may ask it
could send any pixels under any hash. A server without `identity` takes a client's uuid for a name. Features are kept
for days under the name of their image, so under such names they could be another image's.

The mark travels with the request, in vLLM's free-form `extra_args`, or `extra_kwargs` of pooling. Clients can set them,
but only from JSON, which has no bytes; so a mark of bytes is ours. It is set in the API server process, and read in the
engine process, which it reaches as bytes.
"""

from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

PROCESSED_BY_CLIENT: ContextVar[bool] = ContextVar("mmcache_processed_by_client", default=False)
"""Whether the body of the HTTP request that is being worked on brings processed images (its field `features`)."""

_bypassing: WeakSet[Any] = WeakSet()  # output processors of engines whose renderers may name images without `identity`
_MARK = "mmcache_image_namer"
IDENTITY, CLIENT, UNKNOWN = b"identity", b"client", b"unknown"


def may_bypass_identity(output_processor: Any) -> None:
    """Say that the renderer in front of an engine may name images without `identity`: so nobody knows who does.

    output_processor: the one of vLLM that sees that engine's requests.
    """
    _bypassing.add(output_processor)


def mark(request: Any, output_processor: Any) -> None:
    """Mark who has named a request's images: a client or `identity`, or that it is unknown if this may be bypassed.

    For use by `identity`. output_processor: the one of vLLM that sees the request.
    """
    if not request.mm_features:
        return
    if PROCESSED_BY_CLIENT.get():
        set_namer(CLIENT, request)
    else:
        set_namer(UNKNOWN if output_processor in _bypassing else IDENTITY, request)


def set_namer(namer: bytes | None, request: Any) -> None:
    """Set the mark of a request; None changes nothing. Its dictionary of arguments is replaced, not changed."""
    name, params = _params_of(request)
    if params is not None and namer is not None:
        setattr(params, name, {**(getattr(params, name) or {}), _MARK: namer})


def of(request: Any) -> bytes | None:
    """Who has named the images of an engine's request; None where no `identity` has seen it."""
    name, params = _params_of(request)
    namer = (getattr(params, name, None) or {}).get(_MARK)
    return namer if isinstance(namer, bytes) else None


def is_identity(request: Any) -> bool:
    """Whether the names of a request's images say what they show."""
    return of(request) == IDENTITY


def is_client(request: Any) -> bool:
    """Whether a client has named the images of a request, which it has processed itself."""
    return of(request) == CLIENT


def _params_of(request: Any) -> tuple[str, Any]:
    """The name of the attribute with free-form arguments, and the parameters that have it."""
    if request.sampling_params is not None:
        return "extra_args", request.sampling_params
    return "extra_kwargs", request.pooling_params
