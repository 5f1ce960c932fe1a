# SPDX-License-Identifier: Apache-2.0
"""Files of clients in S3, on a real server."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import s3
from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.files.store import FileInfo, FileLost, FileStore

pytest.importorskip("s3fs", reason=s3.NEEDED)
pytestmark = [pytest.mark.process, pytest.mark.skipif(s3.RCLONE is None, reason=s3.NEEDED)]

ALICE, BOB = b"a" * 32, b"b" * 32
CONTENT = bytes(range(256)) * 4096  # a mebibyte


class Served(NamedTuple):
    store: FileStore
    folder: Path
    process: "subprocess.Popen[bytes]"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    (tmp_path / "bucket").mkdir()
    with s3.served(tmp_path) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield Served(FileStore.of(Settings(files="s3://bucket/files")), tmp_path / "bucket", server.process)


def kept(store: FileStore, tenant: bytes, content: bytes = CONTENT) -> FileInfo:
    return store.put(tenant, content, filename="a.png", purpose="vision", media_type="image/png")


def test_kept_found_and_removed(served: Served) -> None:
    info = kept(served.store, ALICE)
    assert kept(served.store, ALICE).id == info.id
    other = FileStore.of(Settings(files="s3://bucket/files"))
    assert other.read(ALICE, info) == CONTENT
    assert [one.id for one in other.files_of(ALICE)] == [info.id]
    assert other.find(BOB, info.id) is None
    assert other.files_of(BOB) == []
    assert kept(served.store, BOB).id != info.id
    assert other.delete(ALICE, info.id)
    assert served.store.find(ALICE, info.id) is None
    assert served.store.files_of(ALICE) == []
    assert served.store.sweep() == 0
    assert len(served.store.files_of(BOB)) == 1
    assert len([path for path in served.folder.rglob("*") if path.is_file()]) == 2


def test_an_object_that_was_changed(served: Served) -> None:
    info = kept(served.store, ALICE)
    (content,) = (path for path in served.folder.rglob("*") if path.is_file() and path.suffix != ".json")
    content.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(FileLost, match="is damaged: upload it again"):
        served.store.read(ALICE, info)
    kept(served.store, ALICE)
    assert served.store.read(ALICE, info) == CONTENT


def test_a_server_that_is_gone(served: Served) -> None:
    info = kept(served.store, ALICE)
    served.process.kill()
    served.process.wait()
    started = time.monotonic()
    for call in (lambda: served.store.find(ALICE, info.id), lambda: kept(served.store, ALICE)):
        with pytest.raises(FilesUnusable, match="ask again later"):
            call()
    assert time.monotonic() - started < 120, "nobody waits for ever"
