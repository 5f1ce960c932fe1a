# SPDX-License-Identifier: Apache-2.0
"""Files that hold a secret: one rule for keys and passwords. Any process."""

import os
import stat
from pathlib import Path

from vllm_mmcache.base.errors import SettingsError

MAX_BYTES = 1024


def read_secret(setting: str, name: str, cure: str) -> bytes:
    """The content of the file `name`, which a setting names.

    cure: what the reader of an error is to do for a file that is not there or too large. Raises: SettingsError for a
    file that can't be read, is no regular file, has more than MAX_BYTES or that others may read or change. Nothing of
    its content is in the message, nor a name that is no path: it can be the secret itself.
    """
    where = f"{setting} {shown(name)}"
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise SettingsError(f"{where}: there is no user of that name, or no home: {cure}") from None
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(file).st_mode
            if not stat.S_ISREG(mode):
                raise SettingsError(f"{where} is no file ({stat.filemode(mode)}): {cure}")
            if mode & 0o027:
                why = f"has mode {stat.filemode(mode)}: others may read or change it"
                raise SettingsError(f"{where} {why}: chmod 600 {path}")
            content = os.read(file, MAX_BYTES + 1)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        why = getattr(error, "strerror", None) or "its name is none of a file"
        raise SettingsError(f"{where} can't be read: {why}: {cure}") from None
    if len(content) > MAX_BYTES:
        raise SettingsError(f"{where} has more than {MAX_BYTES} bytes: {cure}")
    return content


def shown(name: str) -> str:
    """A file's name as a message may have it."""
    return repr(name) if name.startswith(("/", "~", "./", "../")) else "(a relative path)"
