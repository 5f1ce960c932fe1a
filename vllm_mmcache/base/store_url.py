# SPDX-License-Identifier: Apache-2.0
"""What the settings `store` and `files` may name, what an address may be, and how they may be shown. Any process."""

import os
import re
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit, urlunsplit

from pydantic import SecretStr

from vllm_mmcache.base import remote_url
from vllm_mmcache.base.directories import default_directory
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.secret_files import read_secret, shown

STORE = "MMCACHE_STORE"
WITH_URLS = ("store", "files")
"""The settings whose URLs may hold passwords."""
REMOTE_SCHEMES = (*remote_url.SCHEMES, *remote_url.SEVERAL_HOSTS)


def store_places(store: str | None) -> tuple[str | None, str | None]:
    """The directory and the URL that the setting `store` names, each None where it names none.

    Raises: ValueError for a part that is neither, or for two of a kind.
    """
    directory = url = None
    for part in _parts(store or ""):
        if part.startswith(REMOTE_SCHEMES):
            if url is not None:
                raise ValueError("only one URL can be given")
            url = part
            _check(url)
        elif part.startswith(("/", "~")):
            if directory is not None:
                raise ValueError("only one directory can be given")
            directory = os.path.expanduser(part)
            if not directory.startswith("/"):
                raise ValueError(f"there is no user of {_quoted(part, store)}")
        elif part:
            raise ValueError(f"{_quoted(part, store)} is neither an absolute directory nor a URL that is known")
    return directory, url


def check_files(place: str) -> None:
    """Whether the setting `files` may name this: one directory, or one URL. fsspec says later which schemes there are.

    Raises: ValueError for anything else; nothing of a password is in its message.
    """
    scheme, _, rest = place.partition("://")
    if place.startswith(("/", "~")):
        if rest:
            raise ValueError("only one place can be given, a directory or a URL")
        _check_directory(place)
    elif not re.fullmatch(_SCHEME, scheme) or place == scheme:
        raise ValueError("it is neither an absolute directory nor a URL, which has :// behind its scheme")
    elif scheme == "memory":
        raise ValueError("the memory is that of one process, and all servers have to find the files")
    elif scheme in _LOCAL:
        if not rest.startswith(("/", "~")):
            raise ValueError(f"a directory is an absolute path, also behind its scheme: {scheme}:///path")
        _check_directory(rest)
    elif place.startswith(REMOTE_SCHEMES):
        if re.search(r"\s", place):
            raise ValueError("only one place can be given, and a space in a URL is written %20")
        _check(place)
    elif not rest:
        raise ValueError("it names nothing behind ://")


_SCHEME = "[A-Za-z][A-Za-z0-9+._-]*"
_LOCAL = ("file", "local")  # fsspec's schemes of directories


def _check_directory(path: str) -> None:
    if not os.path.expanduser(path).startswith("/"):
        raise ValueError(f"there is no user of {_quoted(path, path)}")


def places_in_use(store: str | None) -> tuple[str | None, str | None]:
    """The directory and the URL that `mmcache serve` uses with this setting. Raises: ValueError as `store_places`.

    An empty MMCACHE_STORE asks for none.
    """
    return store_places(store) if store or STORE in os.environ else (default_directory(), None)


def with_password(url: str, password_file: str | None) -> str:
    """`url` with the password that is the first line of a file; as it is where there is none.

    Raises: SettingsError for a file that can't be used, and where the URL has a password of its own.
    """
    if password_file is None:
        return url
    parts = urlsplit(url)
    if parts.password or "password" in parse_qs(parts.query):
        raise SettingsError("store and store_password_file both hold a password: leave out one of the two")
    cure = "name a file whose first line is the password of Redis or Valkey"
    content = read_secret("store_password_file", password_file, cure)
    try:
        password = content.partition(b"\n")[0].removesuffix(b"\r").decode()
    except UnicodeError:
        password = ""
    if not password:
        raise SettingsError(f"store_password_file {shown(password_file)}: its first line is no text: {cure}")
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.rstrip(':')}:{quote(password, safe='')}@{host}"))


def why_not_in_config(name: str, value: object) -> str:
    """Why one of WITH_URLS must not have this value on a command line; empty where nothing is against it."""
    if not isinstance(value, str) or not _holds_password(value):
        return ""
    why = "holds a password, and command lines are shown to everybody on this machine, and in vLLM's log: set "
    file = ", or leave the password out and name a file that holds it with MMCACHE_STORE_PASSWORD_FILE"
    return f"{why}MMCACHE_{name.upper()} instead{file if name == 'store' else ''}"


def _holds_password(places: str) -> bool:
    """Whether one of these URLs holds a password; also one that is wrong, or of fsspec, as far as can be told."""
    try:
        _, url = store_places(places)
    except ValueError:
        return "@" in places or "password" in places
    return url is not None and has_password(url)


def has_password(url: str) -> bool:
    """Whether a URL that `store_places` has taken holds a password, wherever redis-py reads one."""
    parts = urlsplit(url)
    return bool(parts.password) or any(name in _PASSWORDS for name in parse_qs(parts.query))


_PASSWORDS = ("password", "ssl_password", "sentinel_password")  # options of a URL that hold secrets


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        if not url.startswith(remote_url.SEVERAL_HOSTS):
            _ = parts.port
        # A password with a / or # would end there, and the rest of it would be no part of the address.
        is_cut = parts.scheme != "unix" and "@" in parts.path + parts.fragment
    except ValueError:  # its message can quote a piece of the password
        is_cut = True
    if is_cut:
        raise ValueError(
            "it is no URL that can be read, or its port is no number from 0 to 65535 (a / in a password is written %2F)"
        )
    remote_url.parsed(url)


def _quoted(part: str, store: str | None) -> str:
    """A part of the setting as a message may have it: beside a URL it can be a piece of a password with a space."""
    return "a part of it" if store is None or "://" in store or "@" in store else repr(part)


def _parts(store: str) -> list[str]:
    """What stands between spaces and commas; a comma in a URL of several hosts is part of it."""
    parts: list[str] = []
    for word in store.split():
        num_before = len(parts)
        for part in filter(None, word.split(",")):
            names_several = len(parts) > num_before and parts[-1].startswith(remote_url.SEVERAL_HOSTS)
            if names_several and not part.startswith(("/", "~")) and "://" not in part:
                parts[-1] += f",{part}"
            else:
                parts.append(part)
    return parts


def host_and_port(address: str) -> tuple[str, int]:
    """Of HOST:PORT, an IPv6 host in brackets. Raises: ValueError for anything else."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare) != (bare != host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError("it is no HOST:PORT such as 127.0.0.1:9000 or [::1]:9000")
    return bare, int(port)


def redact(value: Any) -> Any:
    """The value of a setting as it may be shown: a key is hidden, and of URLs users, passwords and options.

    Scheme, host or bucket, port and path of a URL are shown. Of one that can be read in two ways, and of what can't be
    a place, only the beginning is: where a secret ends is not known.
    """
    if isinstance(value, SecretStr):
        return "***"
    if not isinstance(value, str):  # what JSON may have in the place of a text is not looked into
        return type(value).__name__ if isinstance(value, list | dict) else value
    try:
        store_places(value)
    except ValueError:
        if _is_clear(value) and not value.startswith(REMOTE_SCHEMES):
            return _shown(value)
        start = re.match(r"[^@]*?://", value)
        return f"{start[0] if start else ''}***" if start or "@" in value else value
    return " ".join(_shown(part) if part.startswith(REMOTE_SCHEMES) else part for part in _parts(value))


def _shown(url: str) -> str:
    if not _is_clear(url):
        return f"{url.partition('://')[0]}://***"
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    hidden = "".join(f"{mark}***" for mark, part in (("?", parts.query), ("#", parts.fragment)) if part)
    return f"{parts.scheme}://{'***@' if user else ''}{host}{parts.path}{hidden}"


def _is_clear(url: str) -> bool:
    """Whether it is certain which parts of this are the user and the password, if it is a URL at all.

    A password with a /, a ? or a # ends there for every parser, and the @ behind it is somewhere else.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if not parts.scheme or not url[len(parts.scheme) :].startswith("://") or re.search(r"[\x00-\x1f\x7f]", url):
        return False
    if "@" in parts.path + parts.query + parts.fragment:
        return False
    hosts = parts.netloc.rpartition("@")[2]
    names_several = url.startswith(remote_url.SEVERAL_HOSTS)
    return all(re.fullmatch(_HOST, host) for host in (hosts.split(",") if names_several else [hosts]))


_HOST = r"((\[[0-9A-Fa-f:.]+\]|[^\s:@\[\]]+)(:[0-9]{0,5})?)?"


def error_without_secrets(error: object, url: str) -> str:
    """What an error says that is about `url`: without the URL's user, passwords, and what a server sends back of them.

    A Redis that knows no AUTH answers with the arguments that it was sent. url: of `store` or `files`, or a directory.
    """
    if url.startswith(("/", "~")) and "://" not in url:
        return str(error)
    try:
        if url.startswith(REMOTE_SCHEMES):
            _check(url)
        elif not _is_clear(url):
            raise ValueError
    except ValueError:  # then where its secrets are is not known
        return "it can't be read"
    text = re.sub("with args beginning with.*", "with ***", str(error), flags=re.DOTALL)
    text = text.replace(url, redact(url))
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets(url: str) -> set[str]:
    """What of a URL is not to be shown, as it stands there and as it is sent."""
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    given = {
        parts.username,
        parts.password,
        *(one for name in (*_PASSWORDS, "username", "sentinel_username") for one in options.get(name, ())),
    }
    if not url.startswith(REMOTE_SCHEMES):  # which options of fsspec's hold secrets is not known
        given |= {parts.query, parts.fragment, *(one for values in options.values() for one in values)}
    found = {form for one in given if one for form in (one, unquote(one), quote(one), quote(one, safe=""))}
    return found | {repr(one)[1:-1] for one in found}
