# SPDX-License-Identifier: Apache-2.0
"""Whether a directory of a store can be trusted. Any process, any thread."""

import logging
import os
import stat
from pathlib import Path

from vllm_mmcache.base.errors import StoreUnusable

logger = logging.getLogger("vllm.mmcache")

_said: set[Path] = set()  # the directories of which a warning was logged


def is_ours(folder: Path) -> bool:
    """Whether this directory exists and can be trusted.

    If this user owns it and it is open to others, it is closed to them again (mode 0700). Kubernetes opens each
    directory of a volume that has an `fsGroup`.

    Raises: StoreUnusable for a symbolic link, for anything else that is no directory, for a directory of another user,
    and for one that can't be closed to others.
    """
    try:
        seen = folder.lstat()
    except FileNotFoundError:
        return False
    why = ""
    if _is_own_directory(seen) and seen.st_mode & 0o077:
        seen, why = _close_to_others(folder, seen)
    if not _is_own_directory(seen) or seen.st_mode & 0o077:
        raise StoreUnusable(
            f"{folder} has mode {stat.filemode(seen.st_mode)} and owner {seen.st_uid}, expected a directory "
            f"drwx------ of user {os.geteuid()}{why}: remove it, or choose another store"
        )
    return True


def _is_own_directory(seen: os.stat_result) -> bool:
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid()


def _close_to_others(folder: Path, seen: os.stat_result) -> tuple[os.stat_result, str]:
    """Set the mode of the directory. Returns its state afterwards, and the system's reason where it refused.

    If others have put something else in the place of the directory meanwhile, such as a link, it is not touched: the
    mode is set on the opened directory, after a look at its owner.
    """
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _is_own_directory(os.fstat(opened)):
                os.fchmod(opened, 0o700)
            after = os.fstat(opened)
        finally:
            os.close(opened)
    except OSError as error:
        return seen, f", and it can't be made so: {error.strerror}"
    if _is_own_directory(after) and not after.st_mode & 0o077:
        log = logger.debug if folder in _said else logger.warning
        _said.add(folder)
        log(
            "mmcache: %s was open to others (%s) and is closed to them again. What lies in it is used; who could write "
            "there may have changed it",
            folder,
            stat.filemode(seen.st_mode),
        )
    return after, ""
