# SPDX-License-Identifier: Apache-2.0
"""`mmcache store ls | check | gc | clear`: features and records of the store, also while servers use it.

Runs in a process of its own and starts no engine (`warm` does, see warm.py); none loads torch. The store is the
directory of --dir; else what MMCACHE_STORE names, a directory, a Redis or Valkey, or both; else what `mmcache serve`
uses then.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mmcache.base.errors import StoreCorrupt, StoreUnusable
from vllm_mmcache.base.store_url import STORE, places_in_use, with_password
from vllm_mmcache.cli.progress import working
from vllm_mmcache.cli.warm import warm

if TYPE_CHECKING:
    from vllm_mmcache.storage.backend import EntryInfo
    from vllm_mmcache.storage.tier import Tier

REMOTE_TIMEOUT_S = 5.0

store_app = typer.Typer(
    help="List, check, shrink, empty or fill the store of features and records.", no_args_is_help=True
)
store_app.command(short_help="Fill the store with the features of pictures.")(warm)

Place = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="PATH",
        help=f"The store's directory. Without it, {STORE} names the store, else it is that of `mmcache serve`.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask on a terminal. Without a terminal nothing is asked.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")]


@store_app.command("ls", short_help="List what is in the store.")
def ls(place: Place = None, as_json: AsJson = False) -> None:
    """List the packages in the directory, the ones used last first.

    A package holds the features of one image. Records, and what is in Redis or Valkey, are counted.
    """
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"packages": rows}
    with opened(place) as store, working("listing what is there"):
        if store.directory is not None:
            with explained(store.packages) as tier:
                rows += [row(entry, tier) for entry in sorted(tier.backend.scan(), key=lambda entry: -entry.used_s)]
                found["num_aside"] = tier.backend.num_rejected()
            found["records"] = sizes(store.records)
        if store.remote:
            found["remote"] = {kind: sizes(tier) for kind, tier in store.remote.items()}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for line in rows:
        # What a file says of itself may hold anything, also codes that a terminal obeys.
        print(
            line["used"],
            f"{line['num_bytes']:>12}",
            line["key"][:16],
            *ascii_text(line["content_id"][:40], str(line["shape"])),
        )
    if store.directory is not None:
        total = sum(line["num_bytes"] for line in rows)
        print(f"{len(rows)} packages, {total} bytes; {found['num_aside']} files set aside")
        print(f"{found['records']['num']} records, {found['records']['num_bytes']} bytes")
    if store.remote:
        remote = [f"{size['num']} {kind}, {size['num_bytes']} bytes" for kind, size in found["remote"].items()]
        print(f"{store.shown}: {'; '.join(remote)}")


@store_app.command("check", short_help="Verify every package and record, and take out the bad ones.")
def check(place: Place = None, as_json: AsJson = False) -> None:
    """Verify every package and record. Bad files are set aside, and bad entries are removed.

    The exit status is 1 if there was a bad one.
    """
    found: dict[str, Any] = {"good": 0, "set_aside": []}
    num_bad = 0
    with opened(place) as store, working("reading every package and record"):
        if store.directory is not None:
            with explained(store.records) as tier:
                damaged = tier.backend.verify()
            found["good"], bad = checked(store.packages)
            num_good, bad_records = checked(store.records)
            num_bad = len(bad_records)
            found["records"] = {"good": num_good, "removed": num_bad}
            if damaged is not None:
                bad.append((damaged, "records: no database, or a damaged one"))
            found["set_aside"] = [{"key": key, "why": why} for key, why in bad]
        if store.remote:
            by_kind = [checked(tier) for tier in store.remote.values()]
            found["remote"] = {
                "good": sum(good for good, _ in by_kind),
                "removed": sum(len(removed) for _, removed in by_kind),
            }
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for finding in found["set_aside"]:
            print("set aside", finding["key"], *ascii_text(finding["why"]))
        if store.directory is not None:
            print(f"{found['good']} packages are good, {len(found['set_aside'])} files were set aside")
            print(f"{found['records']['good']} records are good, {num_bad} were removed")
        if store.remote:
            said = found["remote"]
            print(f"{store.shown}: {said['good']} entries are good, {said['removed']} were removed")
    raise typer.Exit(1 if found["set_aside"] or num_bad or found.get("remote", {}).get("removed") else 0)


@store_app.command("gc", short_help="Remove what is over its time or over the budgets.")
def gc(place: Place = None, as_json: AsJson = False, dry_run: DryRun = False) -> None:
    """Remove what a killed writer left behind, what was not used for MMCACHE_STORE_TTL, and what is over the budgets.

    The budgets are MMCACHE_STORE_DISK_BYTES and MMCACHE_RECORDS_DISK_BYTES. Entries in Redis or Valkey expire by
    themselves.
    """
    from vllm_mmcache.storage.backend import Usage

    packages = records = Usage(0)
    with opened(place) as store:
        if dry_run:
            tell_to_sweep(store, as_json)
            return
        if store.directory is not None:
            with working("looking for what can go"):
                with explained(store.packages) as tier:
                    packages = tier.sweep()
                with explained(store.records) as tier:
                    records = tier.sweep()
    if as_json:
        of_records = {"held_bytes": records.held_bytes or 0, "evicted": records.num_evicted}
        found = {"held_bytes": packages.held_bytes or 0, "evicted": packages.num_evicted, "records": of_records}
        print(json.dumps(found))
    else:
        print(f"{packages.num_evicted} files evicted, {packages.held_bytes or 0} bytes in use")
        print(f"{records.num_evicted} records evicted, {records.held_bytes or 0} bytes in use")


def tell_to_sweep(store: "Store", as_json: bool) -> None:
    """Print what `gc` would remove now."""
    found = [(0, 0), (0, 0)]
    if store.directory is not None:
        for place, part in enumerate((store.packages, store.records)):
            with explained(part) as tier:
                found[place] = tier.backend.to_sweep()
    (files, file_bytes), (records, record_bytes) = found
    if as_json:
        of_records = {"would_remove": records, "would_remove_bytes": record_bytes}
        print(json.dumps({"would_remove": files, "would_remove_bytes": file_bytes, "records": of_records}))
        return
    print(f"would remove {files} files, {file_bytes} bytes")
    print(f"would remove about {records} records, {record_bytes} bytes")


@store_app.command("clear", short_help="Empty the store.")
def clear(place: Place = None, as_json: AsJson = False, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Remove every package, every record, every file that was set aside, and the folders that are then empty.

    In Redis or Valkey it removes them for the other servers, too, that share it. On a terminal it asks before.
    """
    num_entries = 0
    with opened(place, may_be_empty=place is None) as store:
        if dry_run or asks(yes):
            there = to_clear(store)
            if dry_run:
                tell_to_clear(there, as_json)
                return
            confirm(" and ".join(there.sentences))
        num_files = cleared(store)
        for part in store.remote.values():
            with explained(part) as tier:
                num_entries += tier.backend.clear()
    if as_json:
        print(json.dumps({"removed": num_files} | ({"remote": num_entries} if store.remote else {})))
        return
    if store.directory is not None:
        print(f"{num_files} files removed")
    if store.remote:
        print(f"{store.shown}: {num_entries} entries removed")


def asks(yes: bool) -> bool:
    """Whether a command that removes asks before: on a terminal, unless it was told not to. Scripts have none."""
    return not yes and sys.stdin is not None and sys.stdin.isatty()


def confirm(what: str) -> None:
    """Ask on the terminal whether that may be removed. Raises: typer.Abort for anything but yes."""
    typer.confirm(f"Remove {what}?", abort=True, err=True)


@dataclass(frozen=True)
class ToClear:
    """What `clear` would remove of a store's directory, and of its Redis or Valkey: number and bytes."""

    directory: str | None
    files: tuple[int, int]
    shown: str
    entries: tuple[int, int] | None
    """None without a Redis or Valkey."""

    @property
    def sentences(self) -> list[str]:
        """Each place, with what is there."""
        said = [f"{self.files[0]} files of {self.directory}, {self.files[1]} bytes"] if self.directory else []
        if self.entries is not None:
            said.append(f"{self.entries[0]} entries of {self.shown}, {self.entries[1]} bytes, also for other servers")
        return said


def to_clear(store: "Store") -> ToClear:
    """What `clear` would remove now."""
    files = counted(store.packages, store.records) if store.directory is not None else (0, 0)
    if not store.remote:
        return ToClear(store.directory, files, "", None)
    return ToClear(store.directory, files, store.shown, counted(*store.remote.values()))


def counted(*parts: "Tier | None") -> tuple[int, int]:
    """How many files or entries these would lose together, and their bytes."""
    found = []
    for part in parts:
        with explained(part) as tier:
            found.append(tier.backend.to_clear())
    return sum(num for num, _ in found), sum(num_bytes for _, num_bytes in found)


def tell_to_clear(there: ToClear, as_json: bool) -> None:
    """Print what would be removed."""
    if not as_json:
        for sentence in there.sentences:
            print(f"would remove {sentence}")
        return
    found: dict[str, Any] = {"would_remove": there.files[0], "would_remove_bytes": there.files[1]}
    if there.entries is not None:
        found["remote"] = {"would_remove": there.entries[0], "would_remove_bytes": there.entries[1]}
    print(json.dumps(found))


@dataclass(frozen=True)
class Store:
    """A store: features and records in a directory, both in Redis or Valkey, or all of it."""

    directory: str | None
    packages: "Tier | None"
    """The features in the directory."""
    records: "Tier | None"
    """The records there."""
    remote: dict[str, "Tier"]
    """What is in Redis or Valkey, by kind."""

    @property
    def shown(self) -> str:
        """What the Redis or Valkey is called."""
        return next(iter(self.remote.values())).backend.where


@contextmanager
def opened(place: Path | None, *, may_be_empty: bool = False) -> Iterator[Store]:
    """The store to work on; of a directory's two parts one may not be there.

    Raises: StoreUnusable where there is no store, or where the system or the server refuses.
    """
    from vllm_mmcache.base.settings import load_settings, warn_of_unknown_variables
    from vllm_mmcache.components.features.tiers import FEATURES
    from vllm_mmcache.storage import encryption
    from vllm_mmcache.storage.open import disk_tier, remote_tier
    from vllm_mmcache.storage.record_store import RECORDS

    settings = load_settings()
    warn_of_unknown_variables()
    chosen, url = (str(place.expanduser().absolute()), None) if place else places_in_use(settings.store)
    if chosen is None and url is None:
        raise StoreUnusable(f"{STORE} asks for no store: use --dir PATH, or set it")
    codec = encryption.of(settings.store_key_file)
    store = Store(chosen, None, None, {})
    if url is not None:
        url = with_password(url, settings.store_password_file)
        for name, kind in (("packages", FEATURES), ("records", RECORDS)):
            store.remote[name] = remote_tier(url, settings, kind, codec, REMOTE_TIMEOUT_S)
    if chosen is not None:
        packages, records = (disk_tier(chosen, settings, kind, codec) for kind in (FEATURES, RECORDS))
        store = Store(chosen, packages, records, store.remote)
        with explained(packages):
            is_there = packages.backend.is_there() or records.backend.is_there()
        if not (is_there or store.remote or may_be_empty):
            raise StoreUnusable(
                f"there is no store in {chosen}: `mmcache serve` and `mmcache store warm` make one; "
                f"another is named with --dir, or {STORE}"
            )
    yield store


@contextmanager
def explained(tier: "Tier | None") -> Iterator["Tier"]:
    """A tier to work on; where it refuses, that is a StoreUnusable which says what to do."""
    from vllm_mmcache.storage.backend import Busy

    assert tier is not None
    try:
        yield tier
    except Busy as error:
        raise StoreUnusable(f"{tier.where}: {error}: {tier.backend.remedy}") from None
    except StoreUnusable:
        raise
    except tier.backend.failures as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise StoreUnusable(f"{error.filename}: {error.strerror}: run this as the store's owner") from None
        raise StoreUnusable(f"{tier.where}: {tier.backend.recover(error)}: {tier.backend.remedy}") from None


def cleared(store: Store) -> int:
    """Leave nothing of a store's directory but what is not ours; returns how many files went."""
    if store.directory is None:
        return 0
    num_files = 0
    for part in (store.packages, store.records):
        with explained(part) as tier:
            num_files += tier.backend.clear()
    with suppress(OSError):  # it holds what is not ours, or is a mount
        os.rmdir(store.directory)
    return num_files


def row(entry: "EntryInfo", tier: "Tier") -> dict[str, Any]:
    """What `ls` says of one file; its record is only read, not checked."""
    from vllm_mmcache.components.features.package import read_head

    facts: dict[str, Any] = {
        "key": entry.name.hex(),
        "num_bytes": entry.num_bytes,
        "used": datetime.fromtimestamp(entry.used_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
    }
    try:
        with tier.backend.open(entry.name) as file:
            if file is None:
                raise StoreCorrupt("it is gone")
            record = read_head(tier.codec.decrypt(entry.name, file))
    except (StoreCorrupt, OSError) as error:
        return {**facts, "content_id": f"? ({error})", "model": None, "dtype": None, "layout": None, "shape": None}
    identity = record.identity
    return {
        **facts,
        "content_id": identity.identifier,
        "model": identity.model,
        "dtype": identity.dtype,
        "layout": identity.layout,
        "shape": [record.shape.num_tokens, record.shape.width],
    }


def sizes(part: "Tier | None") -> dict[str, int]:
    """How many entries a tier has, and their bytes."""
    with explained(part) as tier:
        num, num_bytes = tier.backend.sizes()
    return {"num": num, "num_bytes": num_bytes}


def checked(part: "Tier | None") -> tuple[int, list[tuple[str, str]]]:
    """How many entries of a tier are whole, and of each one that was not and is taken out, its name and why."""
    from vllm_mmcache.components.features import tiers
    from vllm_mmcache.storage import frame

    with explained(part) as tier:
        is_package = tier.kind is tiers.FEATURES
        return tier.check(partial(tiers.check, codec=tier.codec) if is_package else frame.check)


def ascii_text(*texts: str) -> list[str]:
    """Texts without a character that a terminal could obey."""
    return [ascii(text)[1:-1] for text in texts]
