# SPDX-License-Identifier: Apache-2.0
"""What the setting `store` may name, what an address and a key may be, and how they may be shown. Any process."""

import os
import re
import sys
from typing import Any

from pydantic import SecretStr

from vllm_mmcache import remote_url

STORE = "MMCACHE_STORE"


def store_places(store: str | None) -> tuple[str | None, str | None]:
    """The directory and the URL that the setting `store` names, each None where it names none.

    Raises: ValueError for a part that is neither, or for two of a kind.
    """
    directory = url = None
    for part in _parts(store or ""):
        if part.startswith((*remote_url.SCHEMES, *remote_url.SEVERAL_HOSTS)):
            if url is not None:
                raise ValueError("only one URL can be given")
            url = part
            remote_url.parsed(url)
        elif part.startswith(("/", "~")):
            if directory is not None:
                raise ValueError("only one directory can be given")
            directory = os.path.expanduser(part)
            if not directory.startswith("/"):
                raise ValueError(f"there is no user of {part!r}")
        elif part:
            raise ValueError(f"{without_secrets(part)!r} is neither an absolute directory nor a URL that is known")
    return directory, url


def default_directory() -> str | None:
    """Where `mmcache serve` keeps features and records if nothing says where: in this user's cache directory.

    By the platform's convention; None where there is none that can be named.
    """
    home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    root = os.environ.get("XDG_CACHE_HOME", "")  # a relative one is to be ignored, says the convention
    place = os.path.join(root if root.startswith("/") else os.path.expanduser(home), "mmcache")
    return place if place.startswith("/") and not set(place) & set(" ,\t\n") else None


def places_in_use(store: str | None) -> tuple[str | None, str | None]:
    """The directory and the URL that `mmcache serve` uses with this setting. Raises: ValueError as `store_places`.

    An empty MMCACHE_STORE asks for none.
    """
    return store_places(store) if store or STORE in os.environ else (default_directory(), None)


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


KEY_CHARS = 16  # the least that a key may have


def check_key(key: str) -> None:
    """Raises: ValueError for a key that is too short to be one, or that can't travel in a header."""
    if len(key) < KEY_CHARS or not all("!" <= char <= "~" for char in key):
        raise ValueError(f"a key has {KEY_CHARS} printable ASCII characters or more, and no space")


def without_secrets(value: Any) -> Any:
    """`value` as it may be shown: a URL's user and password are hidden, and a key is."""
    if isinstance(value, SecretStr):
        return "***"
    return re.sub(r"//\S*@", "//***@", value) if isinstance(value, str) else value
