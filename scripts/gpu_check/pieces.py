# SPDX-License-Identifier: Apache-2.0
"""A folder as pieces of limited size, and back again. Needs the standard library alone.

A piece lies in a folder of its own (`01`, `02`, ...) beside the SHA-256 of all, so that any one of them can be sent by
itself, in any order, and again. What arrives is kept in a store under its digest.
"""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

DIGESTS = "digests.json"  # by the piece's name


class Damaged(Exception):
    """A piece that is not what was sent; the message names it."""


def split(folder: Path, into: Path, piece_bytes: int) -> int:
    """Pack a folder into pieces of at most so many bytes, in place of what `into` held. Returns their number."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    whole, digests = into / "whole", dict[str, str]()
    # Most of it are libraries whose GPU code is compressed already: higher levels take long and gain little.
    with tarfile.open(whole, "w:gz", compresslevel=3) as archive:
        archive.add(folder, ".")
    with whole.open("rb") as file:
        while part := file.read(piece_bytes):
            place = into / f"{len(digests) + 1:02}"
            place.mkdir()
            (place / "piece").write_bytes(part)
            digests[place.name] = hashlib.sha256(part).hexdigest()
    whole.unlink()
    for name in digests:
        (into / name / DIGESTS).write_text(json.dumps(digests))
    return len(digests)


def take(sent: Path, store: Path) -> None:
    """Keep the piece of a folder that was sent; the same again changes nothing. Raises: Damaged."""
    digest = digest_of(sent / "piece")
    if digest not in json.loads((sent / DIGESTS).read_text()).values():
        raise Damaged(f"piece {sent.name} is damaged: it has another digest than was sent; send it again")
    store.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sent / DIGESTS, store / DIGESTS)
    shutil.copyfile(sent / "piece", store / digest)


def missing(store: Path) -> list[str]:
    """The names of the pieces that are not there, or are damaged there."""
    if not (store / DIGESTS).is_file():
        return ["all"]
    digests = json.loads((store / DIGESTS).read_text())
    return [name for name, digest in digests.items() if digest_of(store / digest) != digest]


def join(store: Path, into: Path) -> None:
    """Unpack the folder that was sent, of which nothing is missing, in place of one that is there."""
    whole, unpacking = store / "whole", into.with_name(into.name + ".unpacking")
    with whole.open("wb") as file:
        for digest in json.loads((store / DIGESTS).read_text()).values():
            file.write((store / digest).read_bytes())
    shutil.rmtree(unpacking, ignore_errors=True)
    with tarfile.open(whole) as archive:
        archive.extractall(unpacking, filter="data")
    whole.unlink()
    shutil.rmtree(into, ignore_errors=True)
    unpacking.rename(into)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file; empty without one."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
