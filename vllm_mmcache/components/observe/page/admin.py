# SPDX-License-Identifier: Apache-2.0
"""The admin key: what /mmcache asks for, from the setting `admin_key` or the file that `admin_key_file` names.

API server and command line. The key of the server's clients never opens anything here.
"""

from functools import cache

from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.key_file import check_key
from vllm_mmcache.base.secret_files import read_secret, shown
from vllm_mmcache.base.settings import Settings

MISSING = (
    "no admin key is set, so /mmcache tells nothing: set MMCACHE_ADMIN_KEY or MMCACHE_ADMIN_KEY_FILE before the start, "
    "or start with `mmcache serve MODEL --observe`, which makes one"
)


def admin_key(settings: Settings) -> str | None:
    """The admin key, None where none is set. A file is read once in a process.

    Raises: SettingsError for a file that can't be read, or whose first line is no key.
    """
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    return read(settings.admin_key_file) if settings.admin_key_file else None


@cache
def read(path: str) -> str:
    """The admin key that is the first line of a file. Raises: SettingsError."""
    content = read_secret("admin_key_file", path, "name a file whose first line is the admin key")
    try:
        key = content.partition(b"\n")[0].decode("ascii").strip()
        check_key(key)
    except ValueError as error:
        why = "it is not ASCII" if isinstance(error, UnicodeError) else str(error)
        raise SettingsError(f"admin_key_file {shown(path)}: {why}: its first line is to be the admin key") from None
    return key
