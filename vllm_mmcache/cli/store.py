# SPDX-License-Identifier: Apache-2.0
"""`mmcache store ls | check | gc | clear`: features and records of the store, also while servers use it.

Runs in a process of its own and starts no engine (`warm` does, see warm.py); none loads torch. The store is the
directory of --dir; else what MMCACHE_STORE names, a directory, a Redis or Valkey, or both; else what `mmcache serve`
uses then.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mmcache.base.errors import StoreCorrupt, StoreForeign, StoreKeyMismatch, StoreUnusable
from vllm_mmcache.base.store_url import STORE, places_in_use, with_password
from vllm_mmcache.cli.warm import warm
from vllm_mmcache.storage import encryption
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec

if TYPE_CHECKING:
    from vllm_mmcache.cli.store_remote import RemoteStore
    from vllm_mmcache.components.features.directory import Directory, Entry
    from vllm_mmcache.storage.records.disk import DiskPlace

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


@store_app.command("ls", short_help="List what is in the store.")
def ls(place: Place = None, as_json: AsJson = False) -> None:
    """List the packages in the directory, the ones used last first.

    A package holds the features of one image. Records, and what is in Redis or Valkey, are counted.
    """
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"packages": rows}
    with opened(place) as kept:
        if kept.directory is not None and kept.records is not None:
            rows += [row(entry, kept) for entry in sorted(kept.directory.packages(), key=lambda entry: -entry.used_s)]
            found["num_aside"] = sum(1 for _ in kept.directory.aside())
            found["records"] = dict(zip(("num", "num_bytes"), kept.records.sizes(), strict=True))
        if kept.remote is not None:
            found["remote"] = {
                kind: dict(zip(("num", "num_bytes"), sizes, strict=True)) for kind, sizes in kept.remote.sizes().items()
            }
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
    if kept.directory is not None:
        total = sum(line["num_bytes"] for line in rows)
        print(f"{len(rows)} packages, {total} bytes; {found['num_aside']} files set aside")
        print(f"{found['records']['num']} records, {found['records']['num_bytes']} bytes")
    if kept.remote is not None:
        sizes = [f"{size['num']} {kind}, {size['num_bytes']} bytes" for kind, size in found["remote"].items()]
        print(f"{kept.remote.shown}: {'; '.join(sizes)}")


@store_app.command("check", short_help="Verify every package and record, and take out the bad ones.")
def check(place: Place = None, as_json: AsJson = False) -> None:
    """Verify every package and record. Bad files are set aside, and bad entries are removed.

    The exit status is 1 if there was a bad one.
    """
    found: dict[str, Any] = {"good": 0, "set_aside": []}
    num_bad = 0
    with opened(place) as kept:
        if kept.directory is not None and kept.records is not None:
            found["good"], found["set_aside"] = checked(kept.directory, kept.codec)
            num_records, num_bad, damaged = kept.records.check()
            found["records"] = {"good": num_records, "removed": num_bad}
            if damaged is not None:
                found["set_aside"].append({"key": damaged, "why": "records: no database, or a damaged one"})
        if kept.remote is not None:
            found["remote"] = dict(zip(("good", "removed"), kept.remote.check(), strict=True))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for finding in found["set_aside"]:
            print("set aside", finding["key"], *ascii_text(finding["why"]))
        if kept.directory is not None:
            print(f"{found['good']} packages are good, {len(found['set_aside'])} files were set aside")
            print(f"{found['records']['good']} records are good, {num_bad} were removed")
        if kept.remote is not None:
            said = found["remote"]
            print(f"{kept.remote.shown}: {said['good']} entries are good, {said['removed']} were removed")
    raise typer.Exit(1 if found["set_aside"] or num_bad or found.get("remote", {}).get("removed") else 0)


@store_app.command("gc", short_help="Remove what is over its time or over the budgets.")
def gc(place: Place = None, as_json: AsJson = False) -> None:
    """Remove what a killed writer left behind, what was not used for MMCACHE_STORE_TTL, and what is over the budgets.

    The budgets are MMCACHE_STORE_DISK_BYTES and MMCACHE_RECORDS_DISK_BYTES. Entries in Redis or Valkey expire by
    themselves.
    """
    from vllm_mmcache.base.settings import load_settings

    held_bytes = num_evicted = record_bytes = num_records = 0
    with opened(place) as kept:
        if kept.directory is not None and kept.directory.is_there():
            held_bytes, num_evicted = kept.directory.sweep(load_settings().store_disk_bytes)
        if kept.records is not None:
            record_bytes, num_records = kept.records.sweep()
    if as_json:
        records = {"held_bytes": record_bytes, "evicted": num_records}
        print(json.dumps({"held_bytes": held_bytes, "evicted": num_evicted, "records": records}))
    else:
        print(f"{num_evicted} files evicted, {held_bytes} bytes in use")
        print(f"{num_records} records evicted, {record_bytes} bytes in use")


@store_app.command("clear", short_help="Empty the store.")
def clear(place: Place = None, as_json: AsJson = False) -> None:
    """Remove every package, every record, every file that was set aside, and the folders that are then empty.

    It asks nothing. In Redis or Valkey it removes them for the other servers, too, that share it.
    """
    num_entries = 0
    with opened(place, may_be_empty=place is None) as kept:
        num_files = cleared(kept)
        if kept.remote is not None:
            num_entries = kept.remote.clear()
    if as_json:
        print(json.dumps({"removed": num_files} | ({"remote": num_entries} if kept.remote is not None else {})))
        return
    if kept.directory is not None:
        print(f"{num_files} files removed")
    if kept.remote is not None:
        print(f"{kept.remote.shown}: {num_entries} entries removed")


@dataclass(frozen=True)
class Kept:
    """A store: features and records in a directory, both in Redis or Valkey, or all of it."""

    directory: "Directory | None" = None
    records: "DiskPlace | None" = None
    remote: "RemoteStore | None" = None
    codec: PlainCodec = PLAIN


@contextmanager
def opened(place: Path | None, *, may_be_empty: bool = False) -> Iterator[Kept]:
    """The store to work on; of a directory's two parts one may not be there.

    Raises: StoreUnusable where there is no store, or where the system refuses.
    """
    from vllm_mmcache.base.settings import load_settings, warn_of_unknown_variables
    from vllm_mmcache.components.features.directory import Directory
    from vllm_mmcache.storage.directories import is_ours
    from vllm_mmcache.storage.records.database import Busy
    from vllm_mmcache.storage.records.disk import DiskPlace

    settings = load_settings()
    warn_of_unknown_variables()
    chosen, url = (str(place.expanduser().absolute()), None) if place else places_in_use(settings.store)
    if chosen is None and url is None:
        raise StoreUnusable(f"{STORE} asks for no store: use --dir PATH, or set it")
    codec = encryption.of(settings.store_key_file)
    remote = None
    if url is not None:
        url = with_password(url, settings.store_password_file)
        from vllm_mmcache.cli.store_remote import RemoteStore  # imports redis

        remote = RemoteStore(url, codec)
    if chosen is None:
        yield Kept(remote=remote, codec=codec)
        return
    directory = Directory(chosen, settings.store_ttl)
    records = DiskPlace(chosen, settings.records_disk_bytes, ttl_s=settings.store_ttl, codec=codec)
    try:
        if not any([directory.is_there(), is_ours(records.folder), remote is not None, may_be_empty]):
            raise StoreUnusable(
                f"there is no store in {chosen}: `mmcache serve` and `mmcache store warm` make one; "
                f"another is named with --dir, or {STORE}"
            )
        yield Kept(directory, records, remote, codec)
    except (Busy, sqlite3.Error) as error:
        raise StoreUnusable(f"records in {chosen}: {error}: try again, or `mmcache store clear`") from None
    except OSError as error:
        raise StoreUnusable(f"{error.filename or chosen}: {error.strerror}: run this as the store's owner") from None


def checked(directory: "Directory", codec: PlainCodec) -> tuple[int, list[dict[str, str]]]:
    """How many packages are whole, and of each one that was not and is set aside, its name and why.

    What another key has encrypted, or another version of mmcache has written, is left alone.
    """
    from vllm_mmcache.components.features.lasting import name_of
    from vllm_mmcache.components.features.package import unpack

    num_good = 0
    findings = []
    for entry in directory.packages():
        try:
            with directory.open(entry.key, touch=False) as file:
                if file is None:  # evicted meanwhile
                    continue
                source = codec.opened(file, bytes.fromhex(entry.key))
                packed = bytearray(source.num_bytes)
                source.read_into(0, memoryview(packed), 0.0)
            identity, _, _ = unpack(packed)
            if (name := name_of(identity, codec)) != entry.key:
                raise StoreCorrupt(f"another package: its identity gives the key {name}")
            num_good += 1
        except (StoreKeyMismatch, StoreForeign):
            continue
        except StoreCorrupt as error:
            directory.set_aside(entry.key)
            findings.append({"key": entry.key, "why": str(error)})
    return num_good, findings


def cleared(kept: Kept) -> int:
    """Leave nothing of a store's directory but what is not ours; returns how many files went."""
    if kept.directory is None or kept.records is None:
        return 0
    num_files = (kept.directory.clear() if kept.directory.is_there() else 0) + kept.records.remove()
    with suppress(OSError):  # it holds what is not ours, or is a mount
        os.rmdir(kept.directory.root.parent)
    return num_files


def row(entry: "Entry", kept: Kept) -> dict[str, Any]:
    """What `ls` says of one file; its record is only read, not checked."""
    from vllm_mmcache.components.features.package import read_head

    facts: dict[str, Any] = {
        "key": entry.key,
        "num_bytes": entry.num_bytes,
        "used": datetime.fromtimestamp(entry.used_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
    }
    assert kept.directory is not None
    try:
        with kept.directory.open(entry.key, touch=False) as file:
            if file is None:
                raise StoreCorrupt("it is gone")
            record = read_head(kept.codec.opened(file, bytes.fromhex(entry.key)))
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


def ascii_text(*texts: str) -> list[str]:
    """Texts without a character that a terminal could obey."""
    return [ascii(text)[1:-1] for text in texts]
