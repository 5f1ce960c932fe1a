# SPDX-License-Identifier: Apache-2.0
"""Reads records where they are kept: from a server's /mmcache/records, or from a record file. For the command line.

Imports no vLLM, so that it runs on a machine without vLLM.
"""

import http.client
import itertools
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from vllm_mmcache.base.errors import RecordsError, one_line
from vllm_mmcache.components.observe.record.file import Follower, read_records
from vllm_mmcache.components.observe.record.schema import REQUEST_ID_CHARS, Record, from_json

TIMEOUT_S = 15.0
WAIT_S = 2.0
POLL_S = 0.5
MOST_SHOWN = 100_000
"""How many ids `follow` remembers; an answer has 1000 at most."""
NO_SERVER = "start one with `mmcache serve MODEL --observe`, or name one that runs with --url"
NOT_OURS = "is it a vLLM server with mmcache?"


class Reader(Protocol):
    """One source of records. Every method raises RecordsError that says what to do."""

    def newest(self, num: int) -> list[Record]:
        """The `num` newest records, or all where there are fewer; the newest one comes last."""

    def named(self, name: str) -> list[Record]:
        """The record of that id, or else those of the requests that carry it, newest first; one at least."""

    def follow(self, num: int) -> Iterator[Record]:
        """The newest `num` records, then more as they come, without an end."""


class ServerReader:
    """Records of a server. `url` may end in /v1, as clients have it."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").removesuffix("/mmcache")
        self.admin_key = admin_key

    def newest(self, num: int) -> list[Record]:
        """As Reader says; the server gives at most 1000."""
        return self._records(self._get(f"records?full=1&limit={num}"))

    def named(self, name: str) -> list[Record]:
        """As Reader says; records that had to go for newer ones are unknown there."""
        query = urllib.parse.urlencode({"full": 1, "limit": 1000, "id": name}, errors="surrogatepass")
        found = self._records(self._get(f"records?{query}"))
        if not found:
            raise RecordsError(f"{self.url}: no record {name!r}: it is unknown, or had to go for newer ones")
        return found

    def follow(self, num: int) -> Iterator[Record]:
        """As Reader says; each question waits at the server for up to WAIT_S seconds.

        Where several API servers have one address, any of them may answer, and one that did not give the cursor gives
        all that it keeps. So ids are remembered, and what a server gives so at first begins where the list does.
        """
        news = self._get(f"records?full=1&limit={num}")
        records, cursor = self._records(news), self._cursor(news)
        listed_from_s = min((record.time_s for record in records), default=0.0)
        shown = dict.fromkeys(record.id for record in records)  # in the order in which they were seen last
        servers: set[str] = set()  # that gave all that they keep
        yield from records
        while True:
            asked = _server(cursor)
            query = urllib.parse.urlencode({"full": 1, "limit": 1000, "wait": WAIT_S, "since": cursor})
            news = self._get(f"records?{query}")
            records, cursor = self._records(news), self._cursor(news)
            server = _server(cursor)
            is_first = server != asked and server not in servers
            if is_first:
                servers.add(server)
            fresh = [record for record in records if record.id not in shown]
            yield from (record for record in fresh if not is_first or record.time_s >= listed_from_s)
            for record in records:
                shown.pop(record.id, None)
                shown[record.id] = None
            while len(shown) > MOST_SHOWN:
                del shown[next(iter(shown))]
            if records and not fresh:  # nobody waited for these
                time.sleep(POLL_S)

    def _get(self, path: str) -> dict[str, Any]:
        try:
            request = urllib.request.Request(f"{self.url}/mmcache/{path}")
            if self.admin_key:
                request.add_unredirected_header("Authorization", f"Bearer {self.admin_key}")
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                body = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except http.client.HTTPException as error:  # whatever answers may send anything, also what terminals obey
            raise RecordsError(f"no answer from {self.url}: {ascii(one_line(error))[1:-1]}: {NO_SERVER}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise RecordsError(f"no answer from {self.url}: {reason}: {NO_SERVER}") from None
        if not isinstance(body, dict) or not isinstance(body.get("records"), list):
            raise RecordsError(f"{self.url} answered with no records: {NOT_OURS}")
        return body

    def _cursor(self, body: dict[str, Any]) -> str:
        if not isinstance(cursor := body.get("cursor"), str):
            raise RecordsError(f"{self.url} answered with no cursor: {NOT_OURS}")
        return cursor

    def _refused(self, error: urllib.error.HTTPError) -> RecordsError:
        try:
            said = json.loads(error.read()).get("error")
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            said = None
        if error.code == 401:
            given = "is not the server's" if self.admin_key else "is missing"
            return RecordsError(
                f"{self.url}: the admin key {given}: set MMCACHE_ADMIN_KEY, or name its file with --admin-key-file"
            )
        if not isinstance(said, str):  # the server's own 404
            return RecordsError(
                f"{self.url} has no /mmcache (status {error.code}): start it with `mmcache serve MODEL --observe`"
            )
        return RecordsError(f"{self.url}: {said}")

    def _records(self, body: dict[str, Any]) -> list[Record]:
        return [self._record(given) for given in body["records"]]

    def _record(self, given: Any) -> Record:
        try:
            return from_json(given)
        except ValidationError as error:
            raise RecordsError(f"{self.url}: {unreadable(error)}") from None


class FileReader:
    """Records of a file, and of the one before it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest(self, num: int) -> list[Record]:
        """As Reader says; reads all of the file, and of the one before it."""
        return list(deque(self._records(), maxlen=num))

    def named(self, name: str) -> list[Record]:
        """As Reader says; of a request id the first REQUEST_ID_CHARS characters count, since records have no more."""
        carried = name[:REQUEST_ID_CHARS]
        found = [record for record in self._records() if record.id == name or record.request_id == carried]
        found = [record for record in found if record.id == name] or found
        if not found:
            raise RecordsError(f"{self.path}: no record {name!r} in it")
        return found[::-1]

    def follow(self, num: int) -> Iterator[Record]:
        """As Reader says, of what is within FOLLOWED_BYTES of the file's end; looks into it every POLL_S seconds."""
        follower = Follower(self.path)
        found = deque(_all_new(follower), maxlen=num)
        if not found or follower.num_left_out:
            self.newest(1)  # says what is wrong with the file, which the follower passes over
        yield from found
        while True:
            time.sleep(POLL_S)
            yield from _all_new(follower)

    def _records(self) -> Iterator[Record]:
        try:
            yield from read_records(self.path)
        except OSError as error:
            raise RecordsError(
                f"{self.path}: {error.strerror}: give the record file that MMCACHE_OBSERVE_FILE names"
            ) from None
        except ValueError as error:
            raise RecordsError(str(error)) from None


def _all_new(follower: Follower) -> Iterator[Record]:
    return itertools.chain.from_iterable(iter(follower.read_new, []))


def _server(cursor: str) -> str:
    """The API server that gave a cursor."""
    return cursor.partition("-")[0]


def unreadable(error: ValidationError) -> str:
    """Why something is no record, by its first mistake."""
    first = error.errors()[0]
    return f"no record of this format: {'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
