# SPDX-License-Identifier: Apache-2.0
"""The URL of Redis or Valkey in the setting `store`: what it may be, and who else may reach what lies there.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]                          one server, or a node of a cluster
    redis+cluster://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]...        nodes of a cluster, of which one has to answer
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT],.../SERVICE[/DB]     Sentinels, and the name that they have for it
    unix://[USER:PASSWORD@]/PATH                                      a socket of this machine

rediss:// is redis:// over TLS; valkey:// and valkeys:// are the same two. Options follow after `?`, as redis-py has
them; sentinel_username and sentinel_password are those of the Sentinels. Any process; standard library alone.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

Kind = Literal["one", "cluster", "sentinel"]
Host = tuple[str, int]

PLAIN_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
SCHEMES = tuple(f"{scheme}://" for scheme in (*PLAIN_SCHEMES, "unix"))
SEVERAL_HOSTS = tuple(f"{scheme}+{kind}://" for scheme in PLAIN_SCHEMES for kind in ("cluster", "sentinel"))
"""Those of URLs that may name several hosts, with commas between."""
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_PORTS = {"one": 6379, "cluster": 6379, "sentinel": 26379}
_NO = ("0", "f", "false", "n", "no")
_NO_PORT = "its port is no number from 0 to 65535 (a / in a password is written %2F)"


@dataclass(frozen=True)
class RemoteUrl:
    """What a URL says."""

    kind: Kind
    hosts: tuple[Host, ...]
    """Of a server, nodes of a cluster, or Sentinels; empty for a socket of this machine."""
    service: str
    """What Sentinels call the servers; empty without any."""
    of_first: str
    """The URL that redis-py takes, of the first host."""
    sentinel_options: dict[str, str]
    is_tls: bool
    """Whether there is TLS that verifies the server."""
    is_authenticated: bool
    """Whether a password or a certificate of the client's is asked for."""

    @property
    def is_local(self) -> bool:
        """Whether nothing of it leaves this machine. A Sentinel, or a node of a cluster, names others elsewhere."""
        return self.kind == "one" and all(_is_loopback(host) for host, _ in self.hosts)


def parsed(url: str) -> RemoteUrl:
    """What `url` says. Raises: ValueError for one that can't be meant; nothing of a password is in its message."""
    parts = urlsplit(url)
    scheme, _, kind_said = parts.scheme.partition("+")
    kind: Kind = "cluster" if kind_said == "cluster" else "sentinel" if kind_said == "sentinel" else "one"
    options = parse_qs(parts.query)
    user, at, netloc = parts.netloc.rpartition("@")
    authenticated = bool(parts.password or options.get("password") or options.get("ssl_certfile"))
    if scheme == "unix":
        return RemoteUrl("one", (), "", url, {}, False, authenticated)
    if "@" in parts.path + parts.fragment:  # a password that ends at a / or #, and a rest that is no address
        raise ValueError(_NO_PORT)
    hosts = tuple(_host(part, _PORTS[kind]) for part in netloc.split(","))
    if len(hosts) > 1 and kind == "one":
        raise ValueError("several hosts are for redis+cluster:// and redis+sentinel://")
    service, _, db = parts.path.strip("/").partition("/") if kind == "sentinel" else ("", "", parts.path.strip("/"))
    if kind == "sentinel" and not service:
        raise ValueError("Sentinel has a name for what it watches: redis+sentinel://HOST:26379/NAME")
    if not re.fullmatch("[0-9]*", db):
        raise ValueError("its database is no number such as /0")
    if kind == "cluster" and any(int(number or 0) for number in (db, *options.get("db", ()))):
        raise ValueError("a cluster has the database 0 alone")
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in SENTINEL_OPTIONS]
    own_options = {name: options[name][0] for name in SENTINEL_OPTIONS if name in options}
    if own_options and kind != "sentinel":
        raise ValueError(f"{' and '.join(own_options)} are for redis+sentinel://")
    first_host, first_port = hosts[0]
    where = f"[{first_host}]" if ":" in first_host else first_host
    plain = scheme.replace("valkey", "redis")
    verifies = options.get("ssl_cert_reqs", ["required"])[0].lower() == "required"
    names_host = options.get("ssl_check_hostname", ["yes"])[0].lower() not in _NO
    return RemoteUrl(
        kind,
        hosts,
        service,
        f"{plain}://{user}{at}{where}:{first_port}/{db}" + (f"?{urlencode(query)}" if query else ""),
        own_options,
        plain == "rediss" and verifies and names_host,
        authenticated,
    )


def why_exposed(url: str) -> str:
    """Why others may read or plant what lies at `url`; empty where TLS and a password, or this machine, forbid it.

    Raises: as `parsed`.
    """
    found = parsed(url)
    if found.is_local or (found.is_tls and found.is_authenticated):
        return ""
    lacks = [what for what, is_there in (("TLS", found.is_tls), ("password", found.is_authenticated)) if not is_there]
    return f"no {' and no '.join(lacks)}"


def _host(text: str, port: int) -> Host:
    parts = urlsplit(f"//{text}")
    try:
        return parts.hostname or "localhost", port if parts.port is None else parts.port
    except ValueError:  # its message can quote a piece of the password
        raise ValueError(_NO_PORT) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
