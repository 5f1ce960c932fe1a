# SPDX-License-Identifier: Apache-2.0
"""`mmcache uninstall`: removes all that mmcache keeps on this machine for this user, before pip removes the package.

That is the store's directory, also the one that `mmcache serve` uses unasked, what `mmcache prove` has shown, the
admin key that `mmcache serve --observe` has made, and what `python -m vllm_mmcache.environment` has put into this
Python environment. Redis or Valkey is others', too, and stays.
"""

from contextlib import suppress
from pathlib import Path

from vllm_mmcache.base.errors import StoreUnusable


def uninstall() -> None:
    """Remove what mmcache keeps on this machine for this user, before pip removes the package.

    That is stored features and records, proofs, the admin key that `mmcache serve` made, and the start-up hook of the
    Python environment. What is left is named, with the way to remove it.

    Stop the servers first, since a running server makes its directory anew.
    """
    from vllm_mmcache import environment
    from vllm_mmcache.base.settings import load_settings
    from vllm_mmcache.base.store_url import default_directory, redact, state_directory, store_places
    from vllm_mmcache.cli import store
    from vllm_mmcache.lifecycle import user_proofs

    settings = load_settings()
    directory, url = store_places(settings.store)
    for place in dict.fromkeys(filter(None, (directory, default_directory()))):
        try:
            with store.opened(Path(place)) as kept:
                print(f"removed {store.cleared(kept)} files of {place}")
        except StoreUnusable as error:
            if Path(place).exists():
                print(f"left {place}: {error}")
    with suppress(FileNotFoundError, RuntimeError):
        (state_directory() / "admin-key").unlink()
        print("removed the admin key that `mmcache serve --observe` made")
    if num_proofs := user_proofs.remove():
        print(f"removed {num_proofs} proofs")
    for thing in environment.take_back():
        print(f"removed {thing}")
    if url is not None:
        print(f"left {redact(url)}, which others may use: `mmcache store clear` removes what is ours there")
    if settings.observe_file:
        print(f"left {settings.observe_file}, the file of recorded requests, and the one before it")
    print("the package itself goes with: pip uninstall vllm-mmcache")
