# SPDX-License-Identifier: Apache-2.0
"""Where an image's file is, and how to read it. Any process; imports neither vLLM nor Ray."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Source = bytes | str | os.PathLike[str] | Callable[[], bytes]
"""The file's bytes; a path; a URL that fsspec opens, such as s3://bucket/a.png; or a function that gives the bytes.

A reference of Ray to bytes is one, too.
"""


def check(source: Any) -> None:
    """Raises: TypeError for what is no Source."""
    if not (isinstance(source, bytes | str | os.PathLike) or callable(source) or _is_ray_reference(source)):
        raise TypeError(
            f"an image can't be read from {type(source).__name__}: give the bytes of its file, a path, a URL, a "
            "reference of Ray, or a function without arguments that returns the bytes"
        )


def read(source: Any) -> bytes:
    """The bytes of the file.

    Raises: OSError for a file that is missing or can't be read; ImportError for a URL whose library is not installed;
    TypeError where a function or a reference gives anything but bytes.
    """
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and "://" in source:
        import fsspec

        with fsspec.open(source, "rb") as file:
            return bytes(file.read())
    if isinstance(source, str | os.PathLike):
        return Path(source).read_bytes()
    content = sys.modules["ray"].get(source) if _is_ray_reference(source) else source()
    if not isinstance(content, bytes):
        raise TypeError(f"{describe(source)} gives {type(content).__name__}, and not the bytes of an image's file")
    return content


def describe(source: Any) -> str:
    """The source for an error message; never the bytes themselves, nor what a URL has after its path."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    return repr(_without_secrets(source) if isinstance(source, str) else source)


def describe_error(source: Any, error: Exception) -> str:
    """What an error says of a source, as far as `describe` may: libraries repeat URLs with their signatures."""
    text = f"{type(error).__name__}: {error}"
    return _without_secrets(text) if isinstance(source, str) and "://" in source else text


def _without_secrets(text: str) -> str:
    """A text without users and passwords of the URLs in it, and without what they have after their paths."""
    return re.sub(r"(\w://[^\s'\"<>?#]*)[?#][^\s'\"<>]*", r"\1", re.sub(r"(\w://)[^\s/'\"<>?#]*@", r"\1", text))


def _is_ray_reference(source: Any) -> bool:
    """Whether it is Ray's ObjectRef; nobody has one who has not imported Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(source, ray.ObjectRef)
