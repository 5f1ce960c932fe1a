# SPDX-License-Identifier: Apache-2.0
"""Reads requests from files or a pipe: JSON Lines, a JSON array or a HAR file, plain or compressed with gzip.

A line is a request's body, or holds one: as `body` or `request` (OpenAI's batch files, many gateways) or as text; or it
is a record of a server's `--observe`. What can't be used is counted by why, and the rest is used. Headers are not
looked at.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from vllm_mmcache.base.errors import RecordsError
from vllm_mmcache.traffic.records import Recorded, is_record, older
from vllm_mmcache.traffic.requests import NoPrompt, Prompt, prompt_of

WRAPPERS = ("body", "request", "kwargs", "params", "postData", "text", "log", "message")
MOST_WRAPPED = 4
STDIN = Path("-")
GZIP = b"\x1f\x8b"
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading a compressed file raises where it is cut or damaged."""


@dataclass
class Log:
    """Files of requests, in the order in which they were asked. unused: why -> how many.

    A file of records is read behind the one that the server has turned over before it.
    """

    paths: list[Path]
    """STDIN for what is piped in."""
    unused: Counter[str] = field(default_factory=Counter)
    recorded: Recorded = field(default_factory=Recorded)
    """What those of the requests that are records say of their server."""
    num_bytes: int = 0
    """Read so far, uncompressed."""

    def prompts(self) -> Iterator[Prompt]:
        """Each request that can be used.

        Raises: RecordsError for a file that can't be read, before the first request; for a pipe when its turn comes.
        """
        paths = self._files()
        for path in paths:
            if path != STDIN and (path.is_file() or path.is_dir() or not path.exists()):  # a pipe can be read only once
                with _opened(path):
                    pass
        for path in paths:
            with _opened(path) as file:
                for value in self._values(file):
                    yield from self._prompts_of(value)

    def _files(self) -> list[Path]:
        """Each file once, in order; one that was turned over (NAME.1) comes before the one after it (NAME)."""
        found = dict[Path, None]()
        for path in self.paths:
            before = older(path)
            is_of_records = _is_of_records(before)
            if is_of_records or before in self.paths:
                found[before] = None
            if path.exists() or not is_of_records:  # else nothing was written since
                found[path] = None
        return list(found)

    def _values(self, file: BinaryIO) -> Iterator[Any]:
        """What each line that is not blank holds, as JSON, or a file whose first line only begins a value.

        None for what is no JSON.
        """
        first = True
        try:
            for line in file:
                self.num_bytes += len(line)
                if not line.strip():
                    continue
                value = _parsed(line)
                if first and value is None and line.rstrip().endswith((b"{", b"[", b",")):  # a value over several lines
                    rest = file.read()
                    self.num_bytes += len(rest)
                    value = _parsed(line + rest)
                first = False
                yield value
        except DAMAGED:
            self.unused["behind where a compressed file is cut or damaged"] += 1

    def _prompts_of(self, value: Any) -> Iterator[Prompt]:
        if value is None:
            self.unused["not JSON"] += 1
            return
        for one in _requests_in(value):
            try:
                yield self.recorded.prompt_of(one) if is_record(one) else prompt_of(_unwrapped(one))
            except NoPrompt as error:
                self.unused[str(error)] += 1


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file or a pipe as it is when it is not compressed. Raises: RecordsError where it can't be read."""
    try:
        with open(0, "rb", closefd=False) if path == STDIN else path.open("rb") as file:
            is_compressed = file.peek(2)[:2] == GZIP
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_compressed else file
    except OSError as error:
        raise RecordsError(f"{path} can't be read: {error}") from error


def _is_of_records(path: Path) -> bool:
    if not path.is_file():
        return False
    with _opened(path) as file:
        try:
            return is_record(_parsed(file.readline()))
        except DAMAGED:
            return False


def _parsed(content: bytes) -> Any:
    """JSON, also with what Python writes and the standard has not, such as NaN; None where it is none."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return None


def _requests_in(value: Any) -> list[Any]:
    """Those of a line, or of a file that is one JSON value: a list of requests, or a HAR file."""
    if isinstance(value, dict) and isinstance(value.get("log"), dict) and "entries" in value["log"]:
        entries = value["log"]["entries"]
        return [entry.get("request") for entry in entries or () if isinstance(entry, dict)]
    return value if isinstance(value, list) else [value]


def _unwrapped(value: Any) -> Any:
    """What a line wraps, down to MOST_WRAPPED levels; where that is no request, what has a `prompt` beside it."""
    value, with_prompt = _as_json(value), None
    for _ in range(MOST_WRAPPED + 1):
        if not isinstance(value, dict) or {"messages", "input", "conversations"} & value.keys():
            return value
        if isinstance(value.get("prompt"), str):
            with_prompt = value
        inner = (_as_json(value.get(name)) for name in WRAPPERS)
        found = next((one for one in inner if isinstance(one, dict)), None)
        if found is None:
            break
        value = found
    return with_prompt or value


def _as_json(value: Any) -> Any:
    """What a text holds as JSON, None where it holds none; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
