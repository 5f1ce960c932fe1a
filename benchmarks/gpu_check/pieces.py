# SPDX-License-Identifier: Apache-2.0
"""A folder as pieces of limited size, each with its digest, and back again. Needs the standard library alone.

A piece lies in a folder of its own (`01`, `02`, ...) beside the manifest, so that any one of them can be sent by
itself, in any order, and again. What arrives is kept under its digest.
"""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MIB = 1 << 20
Manifest = Mapping[str, Any]  # pieces: [{name, bytes, sha256}], and what the sender says of them


class Damaged(Exception):
    """A piece that is not what the manifest says; the message names it."""


def split(folder: Path, into: Path, piece_bytes: int, about: Manifest) -> Manifest:
    """Pack a folder into pieces of at most `piece_bytes`, in place of what `into` held. Returns their manifest."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    whole = into / "whole"
    # Most of it are libraries whose GPU code is compressed already: higher levels take long and gain little.
    with tarfile.open(whole, "w:gz", compresslevel=3) as archive:
        archive.add(folder, ".")
    listed = []
    with open(whole, "rb") as file:
        while part := file.read(piece_bytes):
            name = f"{len(listed) + 1:02}"
            (into / name).mkdir()
            (into / name / "piece").write_bytes(part)
            listed.append({"name": name, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()})
    whole.unlink()
    manifest = {**about, "pieces": listed}
    for piece in listed:
        (into / piece["name"] / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


def take(sent: Path, store: Path) -> Manifest:
    """Keep the piece of a folder that was sent; the same again changes nothing. Raises: Damaged."""
    manifest: Manifest = json.loads((sent / MANIFEST).read_text())
    digest = digest_of(sent / "piece")
    name = next((piece["name"] for piece in manifest["pieces"] if piece["sha256"] == digest), None)
    if name is None:
        size = (sent / "piece").stat().st_size
        raise Damaged(
            f"piece {sent.name} is damaged: its {size} bytes have another digest than was sent; send it again"
        )
    store.mkdir(parents=True, exist_ok=True)
    (store / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if not (store / digest).exists():
        shutil.copyfile(sent / "piece", store / "arriving")
        (store / "arriving").rename(store / digest)
    return manifest


def missing(manifest: Manifest, store: Path) -> list[str]:
    """The names of the pieces that have not arrived."""
    return [piece["name"] for piece in manifest["pieces"] if not (store / piece["sha256"]).exists()]


def join(manifest: Manifest, store: Path, into: Path) -> None:
    """Unpack the folder that was sent, when every piece is there; in place of one that is there. Raises: Damaged."""
    for piece in manifest["pieces"]:
        if digest_of(store / piece["sha256"]) != piece["sha256"]:
            (store / piece["sha256"]).unlink()
            raise Damaged(f"piece {piece['name']} was damaged after it arrived; send it again")
    unpacking = into.with_name(into.name + ".unpacking")
    shutil.rmtree(unpacking, ignore_errors=True)
    unpacking.mkdir(parents=True)
    whole = store / "whole"
    with open(whole, "wb") as file:
        for piece in manifest["pieces"]:
            file.write((store / piece["sha256"]).read_bytes())
    with tarfile.open(whole) as archive:
        archive.extractall(unpacking, filter="data")
    whole.unlink()
    shutil.rmtree(into, ignore_errors=True)
    unpacking.rename(into)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
