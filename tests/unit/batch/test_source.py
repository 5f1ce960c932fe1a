# SPDX-License-Identifier: Apache-2.0
"""Where the file of an image may be, and what is said where it is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from vllm_mmcache.batch.source import check, describe, describe_error, read, version

CONTENT = b"the bytes of a file"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "a picture #1?.png"
    file.write_bytes(CONTENT)
    return file


@pytest.mark.parametrize(
    "source_of",
    [
        lambda path: CONTENT,
        lambda path: path,
        lambda path: str(path),
        lambda path: f"file://{path}",
        lambda path: path.read_bytes,
    ],
    ids=["bytes", "path", "path as text", "URL", "function"],
)
def test_what_is_read(path: Path, source_of: Callable[[Path], Any]) -> None:
    check(source_of(path))
    assert read(source_of(path)) == CONTENT


def test_a_url_of_another_file_system() -> None:
    with fsspec.open("memory://bucket/a.png", "wb") as file:
        file.write(CONTENT)
    assert read("memory://bucket/a.png") == CONTENT
    with pytest.raises(FileNotFoundError):
        read("memory://bucket/b.png")


def test_a_url_that_nothing_opens() -> None:
    with pytest.raises(ValueError, match="nonesuch"):
        read("nonesuch://bucket/a.png")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        read(tmp_path / "none.png")


def test_the_version_of_a_file(path: Path) -> None:
    before = version(path)
    assert before is not None
    assert version(str(path)) == before
    path.write_bytes(CONTENT * 2)
    assert version(path) not in (before, None)
    others: list[Any] = [CONTENT, f"file://{path}", path.read_bytes, path.parent / "none.png", "a\0b"]
    assert [version(one) for one in others] == [None] * 5


def test_a_function_that_gives_no_bytes() -> None:
    with pytest.raises(TypeError, match=r"gives str, and not the bytes"):
        read(lambda: "text")


@pytest.mark.parametrize("wrong", [None, 7, ["a.png"], {"bytes": b""}, bytearray(b"x")])
def test_no_source(wrong: object) -> None:
    with pytest.raises(TypeError, match=type(wrong).__name__):
        check(wrong)


def test_what_an_error_says_has_no_secret() -> None:
    assert describe(b"secret") == "6 bytes"
    assert describe("https://bucket/a.png") == "'https://bucket/a.png'"
    for url in (
        "https://bucket/a.png?Signature=a-secret",
        "https://bucket/my picture.png?Signature=a-secret",
        "https://bucket/it's.png?Signature=b'a-secret",
        "sftp://user:b'a-secret@host/a.png#a-secret",
    ):
        said = describe_error(url, OSError(f"403, url='{url}', exceeded with url: {url.partition('/a')[2]}"))
        assert "a-secret" not in said + describe(url)
        assert said.startswith("OSError: 403")
        assert "***" in describe(url)
    assert describe_error("a.png", OSError("a?b")) == "OSError: a?b"
