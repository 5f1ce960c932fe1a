# SPDX-License-Identifier: Apache-2.0
"""Directories of a store: whether one may be trusted. Any process, any thread."""

import logging
import os
import stat
from pathlib import Path

from vllm_mmcache.base.errors import StoreUnusable

logger = logging.getLogger("vllm.mmcache")

_said: set[Path] = set()  # the directories of which a warning was logged


def is_ours(folder: Path) -> bool:
    """Whether there is such a directory that may be trusted.

    One that this user owns and that is open to others is closed to them again (mode 0700): Kubernetes opens each
    directory of a volume with `fsGroup`.

    Raises: StoreUnusable for a symbolic link, what is no directory, one of another user, and one that stays open.
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
    """What the directory is after its mode was set, and what the system said where it refused.

    What others put in the place of the directory meanwhile, such as a link, is not touched: the mode is set on what
    was opened and is ours.
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
