# SPDX-License-Identifier: Apache-2.0
"""`mmcache store ls | check | gc | clear`: the feature store's directory, also while servers use it.

Runs in a process of its own and starts no engine (`warm` does, see warm.py); only `check` loads torch. The directory is
--dir, else that of MMCACHE_STORE. Entries in Redis or Valkey expire by themselves and are not touched here.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mmcache.cli.warm import warm
from vllm_mmcache.errors import StoreCorrupt, StoreUnusable

if TYPE_CHECKING:
    from vllm_mmcache.features.directory import Directory, Entry

store_app = typer.Typer(help="The feature store: list, check, shrink, empty, fill it.", no_args_is_help=True)
store_app.command()(warm)

Place = Annotated[
    Path | None, typer.Option("--dir", metavar="PATH", help="the store's directory [default: that of MMCACHE_STORE]")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]


@store_app.command("ls")
def ls(place: Place = None, as_json: AsJson = False) -> None:
    """List the packages, those used last first."""
    with opened(place) as directory:
        rows = [row(entry) for entry in sorted(directory.packages(), key=lambda entry: -entry.used_s)]
        num_aside = sum(1 for _ in directory.aside())
    if as_json:
        print(json.dumps({"packages": rows, "num_aside": num_aside}, indent=2))
        return
    for line in rows:
        shapes = " ".join(f"{name}{shape}" for name, shape in line["tensors"].items())
        # What a file says of itself may hold anything, also codes that a terminal obeys.
        print(line["used"], f"{line['num_bytes']:>12}", line["key"][:16], *ascii_text(line["content_id"][:40], shapes))
    total = sum(line["num_bytes"] for line in rows)
    print(f"{len(rows)} packages, {total} bytes; {num_aside} files set aside")


@store_app.command("check")
def check(place: Place = None, as_json: AsJson = False) -> None:
    """Verify every package, and set aside what is none. Exit status 1 if there was any."""
    num_good = 0
    findings = []
    with opened(place) as directory:
        from vllm_mmcache.features.package import unpack  # loads torch: not before there is a store

        for entry in directory.packages():
            try:
                packed = directory.read(entry.key, entry.num_bytes, touch=False)
                if packed is None:  # evicted meanwhile
                    continue
                identity, _ = unpack(packed)
                if identity.key != entry.key:
                    raise StoreCorrupt(f"another package: its identity gives the key {identity.key}")
                num_good += 1
            except StoreCorrupt as error:
                directory.set_aside(entry.key)
                findings.append({"key": entry.key, "why": str(error)})
    if as_json:
        print(json.dumps({"good": num_good, "set_aside": findings}, indent=2))
    else:
        for finding in findings:
            print("set aside", finding["key"], *ascii_text(finding["why"]))
        print(f"{num_good} packages are good, {len(findings)} files were set aside")
    raise typer.Exit(1 if findings else 0)


@store_app.command("gc")
def gc(place: Place = None, as_json: AsJson = False) -> None:
    """Remove what a killed writer left, and evict until the budget MMCACHE_STORE_DISK_BYTES holds."""
    from vllm_mmcache.settings import load_settings

    with opened(place) as directory:
        held_bytes, num_evicted = directory.sweep(load_settings().store_disk_bytes)
    if as_json:
        print(json.dumps({"held_bytes": held_bytes, "evicted": num_evicted}))
    else:
        print(f"{num_evicted} files evicted, {held_bytes} bytes in use")


@store_app.command("clear")
def clear(place: Place = None, as_json: AsJson = False) -> None:
    """Remove every package, and every file that was set aside."""
    with opened(place) as directory:
        num_files = directory.clear()
    print(json.dumps({"removed": num_files}) if as_json else f"{num_files} files removed")


@contextmanager
def opened(place: Path | None) -> Iterator["Directory"]:
    """The store to work on. Raises: StoreUnusable where there is none, or where the system refuses."""
    from vllm_mmcache.features.directory import Directory
    from vllm_mmcache.settings import load_settings, store_places

    chosen = place.expanduser() if place else store_places(load_settings().store)[0]
    if chosen is None:
        raise StoreUnusable("no store's directory is given: use --dir PATH, or set MMCACHE_STORE")
    directory = Directory(chosen)
    try:
        if not directory.is_there():
            raise StoreUnusable(f"there is no store in {chosen}: give the directory that MMCACHE_STORE names")
        yield directory
    except OSError as error:
        raise StoreUnusable(f"{error.filename or chosen}: {error.strerror}: run this as the store's owner") from None


def row(entry: "Entry") -> dict[str, Any]:
    """What `ls` says of one file; its record is only read, not checked."""
    from vllm_mmcache.features.record import read_head

    facts: dict[str, Any] = {
        "key": entry.key,
        "num_bytes": entry.num_bytes,
        "used": datetime.fromtimestamp(entry.used_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
    }
    try:
        record = read_head(entry.path)
    except (StoreCorrupt, OSError) as error:
        return {**facts, "content_id": f"? ({error})", "model": None, "dtype": None, "layout": None, "tensors": {}}
    identity = record.identity
    return {
        **facts,
        "content_id": identity.content_id,
        "model": identity.model,
        "dtype": identity.dtype,
        "layout": identity.layout,
        "tensors": {name: tensor.get("shape") for name, tensor in record.tensors.items()},
    }


def ascii_text(*texts: str) -> list[str]:
    """Texts without a character that a terminal could obey."""
    return [ascii(text)[1:-1] for text in texts]
