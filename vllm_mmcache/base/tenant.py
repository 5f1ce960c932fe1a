# SPDX-License-Identifier: Apache-2.0
"""Whose request this is: where a request's tenant is found, and the salt and keys that are made of it.

A tenant is named by the body's `cache_salt`, by a header that a gateway sets, or by the API key: the setting
`tenant_from` says by which. The name in a header or the key is made into a keyed digest at once; that digest, or the
cache_salt as it is, is the salt of the request: vLLM's KV blocks, identifiers of images and what is known about images
are apart by it. A request that names no tenant belongs to one common tenant, which all such requests share.

API server process. The salt lives in a context variable, which follows a request through its tasks; identity/ sets it
and carries it into vLLM's threads. Imports no vLLM.
"""

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from blake3 import blake3

from vllm_mmcache.base.errors import TenantError

SALT: ContextVar[str | None] = ContextVar("mmcache_salt", default=None)
"""The salt of the request that is being worked on; None for the common tenant, and outside a server."""

MAX_NAME_BYTES = 8192
"""The longest header or API key that is taken for a tenant's name."""

_CONTEXT = "vllm-mmcache tenant 1"
_KEY_CONTEXT = "vllm-mmcache tenant name key 1"
_HEADER = re.compile(r"header:([A-Za-z0-9!#$%&'*+.^_`|~-]{1,64})")
_KEY_HEADERS = (b"authorization", b"x-api-key")
# Those whose value is not the operator's to choose; an API key has a kind of its own.
_NO_TENANTS = frozenset({"authorization", "connection", "content-length", "content-type", "host", "transfer-encoding"})

Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case, values with their white space."""


@dataclass(frozen=True)
class TenantSource:
    """Where tenants are found. key: 32 secret bytes for the digests of names, empty for none."""

    kind: Literal["cache_salt", "header", "api_key"] = "cache_salt"
    header: str = ""
    """The header's name in lower case, for the kind `header`."""
    key: bytes = b""

    @property
    def is_gateway(self) -> bool:
        """Whether requests name their tenant beside their body, so that its cache_salt names none."""
        return self.kind != "cache_salt"

    def in_words(self) -> str:
        """What a client or gateway has to send, as an error message begins."""
        if self.kind == "header":
            return f"Header '{self.header}'"
        if self.kind == "api_key":
            return "An API key (header 'Authorization: Bearer ...' or 'x-api-key')"
        return "Parameter 'cache_salt'"

    def parameter(self) -> str:
        """The same as one word, for the field `param` of an error."""
        return {"api_key": "authorization", "cache_salt": "cache_salt"}.get(self.kind, self.header)

    def salt_of(self, name: str | bytes) -> str:
        """The salt of the tenant with this name: a cache_salt itself; else 64 hex digits, a digest keyed with `key`.

        White space around the name of a header or a key is no part of it. Raises: UnicodeEncodeError for a text that is
        none.
        """
        if not self.is_gateway:
            return name.decode() if isinstance(name, bytes) else name
        content = name.encode() if isinstance(name, str) else name
        return blake3(self._beginning + content.strip(), key=self._digest_key).hexdigest()

    @cached_property
    def _beginning(self) -> bytes:
        return f"{self.kind}:{self.header}\0".encode()

    @cached_property
    def _digest_key(self) -> bytes:
        return blake3(self.key, derive_key_context=_KEY_CONTEXT).digest()

    def salt_in(self, headers: Headers) -> str | None:
        """The salt of the request with these headers; None where they name no tenant.

        Raises: TenantError for a header that is repeated, empty or too long, and for two API keys that differ.
        """
        if self.kind == "header":
            name = _single(headers, self.header)
        elif self.kind == "api_key":
            name = _api_key(headers)
        else:
            return None
        return None if name is None else self.salt_of(name)

    def check_body(self, cache_salt: object) -> None:
        """Raises: TenantError where a body's cache_salt names another tenant than its request's header or key."""
        if cache_salt is None or not self.is_gateway:
            return
        if isinstance(cache_salt, str) and SALT.get() is not None:
            try:
                if self.salt_of(cache_salt) == SALT.get():
                    return
            except UnicodeEncodeError:
                pass
        raise TenantError(
            f"Parameter 'cache_salt' names another tenant than the request: {self.in_words()} does that here. "
            "Leave 'cache_salt' out.",
            "cache_salt",
        )


_IN_BODY = TenantSource()
REQUEST_SOURCE: ContextVar[TenantSource] = ContextVar("mmcache_tenant_source", default=_IN_BODY)
"""Where the tenant of the request that is being worked on was looked for."""


def parse_source(text: str, key: bytes = b"") -> TenantSource:
    """The source that the setting `tenant_from` names. Raises: ValueError for anything else."""
    if text in ("cache_salt", "api_key"):
        return TenantSource(text, key=key)  # type: ignore[arg-type]
    found = _HEADER.fullmatch(text)
    if found is None:
        raise ValueError("it is neither cache_salt nor api_key nor header:NAME, such as header:X-Tenant")
    if found[1].lower() in _NO_TENANTS:
        raise ValueError(f"the header {found[1]} can't name a tenant: use one of the gateway's own, or api_key")
    return TenantSource("header", found[1].lower(), key)


def current(given: str | None) -> str | None:
    """The salt of the request that is being worked on; `given`, its prompt's own, where nothing has set one."""
    return SALT.get() or given


def key_of(salt: str | None) -> bytes | None:
    """32 bytes that stand for a tenant; None for all requests without a salt. Raises: UnicodeEncodeError."""
    return blake3(salt.encode(), derive_key_context=_CONTEXT).digest() if salt else None


def digest(content: bytes | memoryview, key: bytes | None) -> bytes:
    """BLAKE3 of `content`, 32 bytes, keyed with the tenant's key, so that no two tenants share a digest."""
    return (blake3(content) if key is None else blake3(content, key=key)).digest()


def _single(headers: Headers, name: str) -> bytes | None:
    """The value of a header that may be there once; None where it is not. Raises: TenantError."""
    wanted = name.encode()
    values = [value for one, value in headers if one == wanted]
    if not values:
        return None
    if len(values) > 1:
        raise TenantError(f"Header '{name}' was sent {len(values)} times, and names a tenant: send it once.", name)
    return _checked(values[0], name)


def _api_key(headers: Headers) -> bytes | None:
    """The API key of a request: a bearer token, or what Anthropic's clients send. Raises: TenantError."""
    headers = [one for one in headers if one[0] in _KEY_HEADERS]
    if not headers:
        return None
    scheme, _, token = (_single(headers, "authorization") or b"").partition(b" ")
    bearer = _checked(token, "authorization") if scheme.lower() == b"bearer" else None
    other = _single(headers, "x-api-key")
    if bearer is not None and other is not None and bearer != other:
        raise TenantError(
            "Headers 'authorization' and 'x-api-key' hold two API keys, and the key names a tenant: send one.",
            "authorization",
        )
    return other if bearer is None else bearer


def _checked(value: bytes, name: str) -> bytes:
    """A tenant's name without white space around it. Raises: TenantError."""
    stripped = value.strip()
    if not stripped:
        raise TenantError(f"Header '{name}' is empty, and names a tenant: send the tenant's name, or no header.", name)
    if len(stripped) > MAX_NAME_BYTES:
        raise TenantError(
            f"Header '{name}' has {len(stripped)} bytes, and names a tenant: at most {MAX_NAME_BYTES} are allowed.",
            name,
        )
    return stripped
