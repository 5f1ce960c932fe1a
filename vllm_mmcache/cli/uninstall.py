# SPDX-License-Identifier: Apache-2.0
"""`mmcache uninstall`: removes all that mmcache keeps on this machine for this user, before pip removes the package.

That is the store's directory, also the one that `mmcache serve` uses unasked, what `mmcache prove` has shown, the
admin key that `mmcache serve --observe` has made, and what `python -m vllm_mmcache.environment` has put into this
Python environment. Redis or Valkey is others', too, and stays.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from vllm_mmcache.base.directories import admin_key_file, default_directory
from vllm_mmcache.base.errors import EnvironmentProblem, ProofsUnwritable, StoreUnusable
from vllm_mmcache.cli import store
from vllm_mmcache.cli.store import AsJson, DryRun, Store, Yes

Outcome = TypeVar("Outcome")

MADE_KEY = "the admin key that `mmcache serve --observe` made"


def uninstall(yes: Yes = False, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Remove what mmcache keeps on this machine for this user, before pip removes the package.

    That is stored features and records, proofs, the admin key that `mmcache serve` made, and the start-up hook of the
    Python environment. What is left is named, with the way to remove it. On a terminal it asks before.

    Stop the servers first, since a running server makes its directory anew. Where something can't be removed, all else
    is, and the exit status is 2.
    """
    from vllm_mmcache.base.settings import load_settings
    from vllm_mmcache.base.store_url import redact, store_places

    settings = load_settings()
    directory, url = store_places(settings.store)
    places = list(dict.fromkeys(filter(None, (directory, default_directory()))))
    if dry_run or store.asks(yes):
        found, refused = to_remove(places)
        if dry_run:
            if as_json and not refused:
                print(json.dumps({"would_remove": found}))
            elif not as_json:
                tell("would remove", found, "" if refused else "there is nothing to remove")
            if refused:
                raise StoreUnusable("; ".join(refused))
            return
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            tell("would remove", found)
            for sentence in refused:
                print(sentence)
        if found:
            store.confirm("all of this")
    removed, refused = remove(places)
    left = []
    if url is not None:
        left.append(f"{redact(url)}, which others may use: `mmcache store clear` removes what is ours there")
    if settings.files:
        left.append(f"{redact(settings.files)}, where images that clients uploaded are, those that expired among them")
    if settings.observe_file:
        left.append(f"{settings.observe_file}, the file of recorded requests, and the one before it")
    if as_json and not refused:
        print(json.dumps({"removed": removed, "left": left}))
    elif not as_json:
        tell("removed", removed)
        tell("left", left)
        print("the package itself goes with: pip uninstall vllm-mmcache")
    if refused:
        raise StoreUnusable("; ".join(refused))


def tell(what: str, things: Sequence[str], instead: str = "") -> None:
    """Print a line for each thing, or `instead` where there is none."""
    for thing in things:
        print(what, thing)
    if instead and not things:
        print(instead)


def to_remove(places: Sequence[str]) -> tuple[list[str], list[str]]:
    """What would be removed now, of stores at these places and of all else; and which stores would be left, and why."""
    from vllm_mmcache import environment
    from vllm_mmcache.lifecycle import user_proofs

    stores, refused = at_stores(places, store.to_clear, "would be left")
    found = [sentence for there in stores.values() if there.files[0] for sentence in there.sentences]
    with contextlib.suppress(RuntimeError, OSError):  # there is no home, or one that others can't look into
        if admin_key_file().exists():
            found.append(MADE_KEY)
    if num_proofs := len(user_proofs.read()[0]):
        found.append(f"{num_proofs} proofs")
    return [*found, *environment.to_forget_written()], refused


def remove(places: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove all that `to_remove` names. Returns what went, and a sentence about each thing that is left."""
    from vllm_mmcache import environment
    from vllm_mmcache.lifecycle import user_proofs

    stores, refused = at_stores(places, store.cleared, "is left")
    removed = [f"{num_files} files of {place}" for place, num_files in stores.items() if num_files]
    try:
        admin_key_file().unlink()
        removed.append(MADE_KEY)
    except (FileNotFoundError, RuntimeError):  # there is none, or no home where it could be
        pass
    except OSError as error:
        refused.append(f"{MADE_KEY} is left: {error}: remove it as its owner")
    try:
        if num_proofs := user_proofs.remove():
            removed.append(f"{num_proofs} proofs")
    except ProofsUnwritable as error:
        refused.append(str(error))
    try:
        removed += environment.take_back()
    except EnvironmentProblem as error:
        refused.append(str(error))
    return removed, refused


def at_stores(
    places: Sequence[str], act: Callable[[Store], Outcome], what: str
) -> tuple[dict[str, Outcome], list[str]]:
    """Do something with each of the stores at these places.

    Returns what came of it, by place; and a sentence for each store for which that failed, with `what` behind its
    place, such as "is left".
    """
    outcomes: dict[str, Outcome] = {}
    refused: list[str] = []
    for place in places:
        try:
            with store.opened(Path(place), may_be_empty=True) as kept:
                outcomes[place] = act(kept)
        except StoreUnusable as error:
            refused.append(f"{place} {what}: {error}")
    return outcomes, refused
