# SPDX-License-Identifier: Apache-2.0
"""Where this user's own files lie if nothing says where: what is made once, and what is cached. Any process."""

import os
import sys
from pathlib import Path


def state_directory() -> Path:
    """Where what is made once for this user lies. Raises: RuntimeError where no home directory is known."""
    home = os.environ.get("XDG_STATE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state") / "mmcache"


def admin_key_file() -> Path:
    """Where `mmcache serve --observe` keeps the key that it made. Raises: RuntimeError as `state_directory`."""
    return state_directory() / "admin-key"


def default_directory() -> str | None:
    """Where `mmcache serve` keeps features and records if nothing says where: in this user's cache directory.

    By the platform's convention; None where there is none that can be named.
    """
    home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    root = os.environ.get("XDG_CACHE_HOME", "")  # a relative one is to be ignored, says the convention
    place = os.path.join(root if root.startswith("/") else os.path.expanduser(home), "mmcache")
    return place if place.startswith("/") and not set(place) & set(" ,\t\n") else None
