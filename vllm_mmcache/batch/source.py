# SPDX-License-Identifier: Apache-2.0
"""Where an image's file is, and how to read it. Any process; imports neither vLLM nor Ray."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_mmcache.base.store_url import error_without_secrets, redact

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
    if is_url(source):
        import fsspec

        with fsspec.open(source, "rb") as file:
            return bytes(file.read())
    if isinstance(source, str | os.PathLike):
        return Path(source).read_bytes()
    content = sys.modules["ray"].get(source) if _is_ray_reference(source) else source()
    if not isinstance(content, bytes):
        raise TypeError(f"{describe(source)} gives {type(content).__name__}, and not the bytes of an image's file")
    return content


def version(source: Any) -> tuple[int, int] | None:
    """When the file at a path was changed, in ns, and its bytes; None for any other source and for a missing file."""
    if is_url(source) or not isinstance(source, str | os.PathLike):
        return None
    try:
        found = os.stat(source)
    except (OSError, ValueError):  # missing, or no path at all
        return None
    return found.st_mtime_ns, found.st_size


def describe(source: Any) -> str:
    """The source for an error message; never the bytes themselves, nor a URL's user, password or query."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    return repr(redact(source) if is_url(source) else source)


def describe_error(source: Any, error: Exception) -> str:
    """What an error says of a source, as far as `describe` may: libraries repeat URLs with their signatures."""
    said = error_without_secrets(error, source) if is_url(source) else str(error)
    return f"{type(error).__name__}: {said}"


def is_url(source: Any) -> bool:
    """Whether fsspec reads it; its errors, and tracebacks with them, may have the URL's secrets."""
    return isinstance(source, str) and "://" in source


def _is_ray_reference(source: Any) -> bool:
    """Whether it is Ray's ObjectRef; nobody has one who has not imported Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(source, ray.ObjectRef)
