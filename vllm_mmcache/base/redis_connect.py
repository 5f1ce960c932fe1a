# SPDX-License-Identifier: Apache-2.0
"""Clients of redis-py for a URL in the setting `store`, with no connection made yet. Any process; imports redis."""

import os
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.remote_url import Host, RemoteUrl, parsed
from vllm_mmcache.base.store_url import error_without_secrets, redact

FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
SOCKET: Host = ("", 0)


def checked(url: str, timeout_s: float) -> tuple[RemoteUrl, dict[str, Any]]:
    """What `url` says, and the options of its connections. Makes no connection.

    Raises: SettingsError for a URL that can't be meant, an option that redis-py does not know, and a file that nobody
    can read; nothing secret is in its message.
    """
    try:
        found = parsed(url)
        options = _options(found.of_first, timeout_s)
        client_of(found, first_host(found), options).connection_pool.make_connection()
    except (ValueError, TypeError, redis.RedisError) as error:
        said = error_without_secrets(error, url)
        raise SettingsError(f"{redact(url)!r} is no URL of Redis or Valkey: {said}") from None
    return found, options


def first_host(url: RemoteUrl) -> Host:
    """The first host of a URL; SOCKET where it names none."""
    return (url.hosts or (SOCKET,))[0]


def client_of(url: RemoteUrl, host: Host, options: dict[str, Any]) -> "redis.Redis":
    """A client of one of the URL's hosts; of Sentinels, of what they watch."""
    if url.kind == "sentinel":
        return _by_sentinel(url.hosts, url.service, options, url.sentinel_options)
    where = {} if host == SOCKET else {"host": host[0], "port": host[1]}
    return redis.Redis(connection_pool=redis.ConnectionPool(**options | where))


def _options(url: str, timeout_s: float) -> dict[str, Any]:
    """Of redis-py's connections. Raises: ValueError for what redis-py can't read, and for files that nobody can."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,  # one round trip less to connect, and nothing that a server pushes
        "retry": Retry(NoBackoff(), 0),  # redis-py's own retries wait for seconds
    } | dict(parse_url(url))  # type: ignore[no-untyped-call]
    if options.get("connection_class") is SSLConnection:
        options.setdefault("ssl_check_hostname", True)
    for name in FILES:
        if (path := options.get(name)) is not None and not os.access(path, os.R_OK):
            raise ValueError(f"{name} = {path!r} can't be read")
    return options


def _by_sentinel(
    hosts: tuple[Host, ...], service: str, options: dict[str, Any], own_options: dict[str, str]
) -> "redis.Redis":
    """A client of the primary that the Sentinels name, asked for with each new connection."""
    options = {name: value for name, value in options.items() if name not in ("host", "port")}
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    of_sentinels = {
        name: value
        for name, value in options.items()
        if name in ("protocol", "retry") or name.startswith(("socket_", "ssl"))
    } | {name.removeprefix("sentinel_"): value for name, value in own_options.items()}
    sentinel = Sentinel(list(hosts), sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    return cast("redis.Redis", sentinel.master_for(service, **options))  # type: ignore[no-untyped-call]
