# SPDX-License-Identifier: Apache-2.0
"""The transports: one wraps the httpx transport that does the sending, sync or async, of httpx or httpx2.

Chat requests go out with their images named, and without the bytes of images that the server has been sent. Where it
refuses such a request, it has forgotten one, or would refuse the whole request as well: the whole request decides.
Each has a header that names its conversation, by which routers send it to the replica that has seen its images.
"""

import importlib
import json
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any, Self

from blake3 import blake3

from vllm_mmcache.base import distributions
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.client.affinity import HEADER, Affinity
from vllm_mmcache.client.images import Images, find_images
from vllm_mmcache.client.sent import Sent

PATH_END = "/chat/completions"  # vLLM takes ids in image parts of other endpoints too, but no openai client sends them
# 400: an unknown id; 422: a gateway that checks bodies; 500: a server that did not expect an image without bytes
REFUSALS = frozenset({400, 422, 500})
OF_BODY = (b"content-length", b"transfer-encoding")  # how another body is sent; httpx says it anew
KEY_HEADERS = ("authorization", "api-key", "x-api-key")


class _Once:
    """What both transports share.

    inner is an httpx transport; sent and affinity may be shared with other transports. affinity is also the name of a
    header, or several, and None for no header.
    """

    def __init__(
        self,
        inner: Any,
        *,
        enabled: bool = True,
        sent: Sent | None = None,
        affinity: Affinity | str | Sequence[str] | None = HEADER,
    ) -> None:
        self.inner = inner
        self.enabled = enabled
        self.sent = Sent() if sent is None else sent
        self.affinity = affinity if affinity is None or isinstance(affinity, Affinity) else Affinity(affinity)

    def _turn(self, request: Any) -> "_Turn | None":
        """The request as a turn with images; None for every other request, which passes as it is."""
        if not (self.enabled and request.method == "POST" and request.url.path.endswith(PATH_END)):
            return None
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" or "content-encoding" in request.headers:
            return None
        try:
            body = request.content
        except RuntimeError:  # RequestNotRead: a body that is made while it is sent
            return None
        images = find_images(body)
        return None if images is None else _Turn(request, images, self.sent, self.affinity)


class _Turn:
    """One request with images: what to send first, what to send if that is refused, and what to remember."""

    def __init__(self, request: Any, images: Images, sent: Sent, affinity: Affinity | None) -> None:
        self._request = request
        self._images = images
        self._sent = sent
        url = request.url
        keys = [request.headers.get(name) for name in KEY_HEADERS]
        scope = [url.scheme, url.host, url.port, url.path, keys, images.scope]
        self._scope = blake3(json.dumps(scope, sort_keys=True).encode()).digest()
        self._host = f"{url.scheme}://{url.host}:{url.port}"
        self._known = sent.known(self._scope, images.ids)
        if self._known and sent.goes_whole(self._host):
            self._known = frozenset()
        self._was_refused = False
        self._headers: list[tuple[bytes, bytes]] = []
        if affinity is not None:
            name = affinity.name_of(json.dumps([keys, images.scope[1]]).encode(), images.ids).encode()
            self._headers = [(header.encode(), name) for header in affinity.headers if header not in request.headers]

    def short(self) -> Any:
        """The request without the bytes that the server should know."""
        return self._with(self._images.body(self._known))

    def whole(self) -> Any:
        """The request with all bytes, after a refusal."""
        self._was_refused = True
        return self._with(self._images.body(()))

    def is_refused(self, response: Any) -> bool:
        """Whether the whole request must decide."""
        return bool(self._known) and response.status_code in REFUSALS

    def remember(self, response: Any) -> None:
        """The server knows the images if it has accepted the request; also when its answer is still streaming."""
        if response.status_code != 200:
            return
        self._sent.remember(self._scope, self._images.ids)
        if self._was_refused:
            self._sent.missed(self._host)
        elif self._known:
            self._sent.accepted(self._host)

    def _with(self, body: bytes) -> Any:
        request = self._request
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in OF_BODY]
        return type(request)(
            request.method,
            request.url,
            headers=headers + self._headers,
            content=body,
            extensions=request.extensions,
        )


class OnceTransport(_Once):
    """For `httpx.Client(transport=...)`. Errors of the inner transport pass unchanged."""

    def handle_request(self, request: Any) -> Any:
        """Send one request; its images' bytes only if the server needs them."""
        turn = self._turn(request)
        if turn is None:
            return self.inner.handle_request(request)
        response = self.inner.handle_request(turn.short())
        if turn.is_refused(response):
            response.read()  # so that the connection is used again
            response.close()
            response = self.inner.handle_request(turn.whole())
        turn.remember(response)
        return response

    def close(self) -> None:
        """Close the inner transport."""
        self.inner.close()

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.inner.__exit__(kind, error, traceback)


class AsyncOnceTransport(_Once):
    """For `httpx.AsyncClient(transport=...)`. Errors of the inner transport pass unchanged."""

    async def handle_async_request(self, request: Any) -> Any:
        """Send one request; its images' bytes only if the server needs them."""
        turn = self._turn(request)
        if turn is None:
            return await self.inner.handle_async_request(request)
        response = await self.inner.handle_async_request(turn.short())
        if turn.is_refused(response):
            await response.aread()  # so that the connection is used again
            await response.aclose()
            response = await self.inner.handle_async_request(turn.whole())
        turn.remember(response)
        return response

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self.inner.aclose()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(kind, error, traceback)


def http_client(
    *,
    enabled: bool = True,
    sent: Sent | None = None,
    affinity: Affinity | str | Sequence[str] | None = HEADER,
    **options: Any,
) -> Any:
    """`OpenAI(http_client=http_client())`: openai's default client over this transport.

    options go to the HTTPTransport below it (verify, cert, proxy, retries, ...). Proxies named by environment
    variables don't count, as with every httpx client that is given a transport.
    """
    openai = _openai()
    inner = _httpx(openai.DefaultHttpxClient).HTTPTransport(**_defaults(options))
    return openai.DefaultHttpxClient(transport=OnceTransport(inner, enabled=enabled, sent=sent, affinity=affinity))


def async_http_client(
    *,
    enabled: bool = True,
    sent: Sent | None = None,
    affinity: Affinity | str | Sequence[str] | None = HEADER,
    **options: Any,
) -> Any:
    """`AsyncOpenAI(http_client=async_http_client())`; as http_client."""
    openai = _openai()
    inner = _httpx(openai.DefaultAsyncHttpxClient).AsyncHTTPTransport(**_defaults(options))
    transport: Any = AsyncOnceTransport(inner, enabled=enabled, sent=sent, affinity=affinity)
    return openai.DefaultAsyncHttpxClient(transport=transport)


def _openai() -> Any:
    """The package openai. Raises: EnvironmentProblem."""
    try:
        return importlib.import_module("openai")
    except ImportError as error:
        raise EnvironmentProblem(
            f"the client needs the package openai ({error}): {distributions.install_command('client')}"
        ) from error


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    return {"limits": _openai().DEFAULT_CONNECTION_LIMITS, **options}


def _httpx(client: type) -> ModuleType:
    """The httpx that this openai uses: httpx, or httpx2 from openai 3 on."""
    base = next(one for one in client.__mro__ if one.__name__ in ("Client", "AsyncClient"))
    return importlib.import_module(base.__module__.partition(".")[0])
