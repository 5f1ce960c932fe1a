# SPDX-License-Identifier: Apache-2.0
"""Reads requests from files: JSON Lines, a JSON array or a HAR file, plain or compressed with gzip.

A line is a request's body, or holds one: as `body` or `request` (OpenAI's batch files, many gateways) or as text; or it
is a record of a server's `--observe`. What can't be used is counted by why, and the rest is used. Headers are not
looked at.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from vllm_mmcache.base.errors import RecordsError
from vllm_mmcache.traffic.records import Record, Recorded, is_record, older, read
from vllm_mmcache.traffic.requests import NoPrompt, Prompt, prompt_of

WRAPPERS = ("body", "request", "kwargs", "params", "postData", "text")
MOST_WRAPPED = 4
GZIP = b"\x1f\x8b"


@dataclass
class Log:
    """Files of requests, in the order in which they were asked. unused: why -> how many.

    A file of records is read behind the one that the server has turned over before it.
    """

    paths: list[Path]
    unused: Counter[str] = field(default_factory=Counter)
    recorded: Recorded = field(default_factory=Recorded)
    """What those of the requests that are records say of their server."""
    num_bytes: int = 0
    """Read so far, uncompressed."""

    def prompts(self) -> Iterator[Prompt]:
        """Each request that can be used. Raises: RecordsError for a file that can't be read."""
        for path in self._files():
            with _opened(path) as file:
                yield from self._prompts_in(file)

    def first_record(self) -> Record | None:
        """The first line of the first file, if it is a record. Raises: RecordsError for a file that can't be read."""
        return next(map(_first_record, self._files()), None)

    def _files(self) -> Iterator[Path]:
        for path in self.paths:
            before = older(path)
            if before not in self.paths and before.exists() and _first_record(before) is not None:
                yield before
                if not path.exists():  # it was turned over, and nothing was written since
                    continue
            yield path

    def _prompts_in(self, file: IO[bytes]) -> Iterator[Prompt]:
        first = True
        for line in file:
            self.num_bytes += len(line)
            if not line.strip():
                continue
            if first and _is_whole(line):
                rest = file.read()
                self.num_bytes += len(rest)
                yield from self._prompts_of(line + rest, _requests_of_whole)
                return
            first = False
            yield from self._prompts_of(line, lambda value: [value])

    def _prompts_of(self, content: bytes, requests_of: Callable[[Any], list[Any]]) -> Iterator[Prompt]:
        """Of one JSON value, in which requests_of finds the requests."""
        try:
            value = msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError):
            self.unused["not JSON"] += 1
            return
        for one in requests_of(value):
            try:
                yield self.recorded.prompt_of(one) if is_record(one) else prompt_of(_unwrapped(one))
            except NoPrompt as error:
                self.unused[str(error)] += 1


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file as it is when it is not compressed. Raises: RecordsError where it can't be read."""
    try:
        with path.open("rb") as file:
            is_compressed = file.read(2) == GZIP
        opener: Callable[..., Any] = gzip.open if is_compressed else open
        with opener(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise RecordsError(f"{path} can't be read: {error}") from error


def _first_record(path: Path) -> Record | None:
    with _opened(path) as file:
        try:
            value = msgspec.json.decode(file.readline())
            return read(value) if is_record(value) else None
        except (msgspec.DecodeError, RecursionError, NoPrompt):
            return None


def _requests_of_whole(value: Any) -> list[Any]:
    """Of a file that is one JSON value: a list of requests, or a HAR file."""
    if isinstance(value, dict) and isinstance(value.get("log"), dict):
        entries = value["log"].get("entries")
        return [entry.get("request") for entry in entries or () if isinstance(entry, dict)]
    return value if isinstance(value, list) else [value]


def _is_whole(line: bytes) -> bool:
    """Whether a file that begins with this line is one JSON value over several lines, or a list, or a HAR file."""
    start = line.strip()
    if start.startswith(b"[") or (start.startswith(b"{") and b'"log"' in start[:64]):
        return True
    return start == b"{"


def _unwrapped(value: Any) -> Any:
    """The request in a line."""
    for _ in range(MOST_WRAPPED):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        if not isinstance(value, dict) or "messages" in value or "input" in value:
            return value
        inner = next((value[name] for name in WRAPPERS if isinstance(value.get(name), dict | str)), None)
        if inner is None:
            return value
        value = inner
    return value
