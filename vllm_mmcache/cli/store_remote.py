# SPDX-License-Identifier: Apache-2.0
"""What `mmcache store` does in Redis or Valkey: count, check and remove what is ours, and nothing else there.

Names are found by SCAN, which keeps nobody waiting. Servers may use it meanwhile, and other programs, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from time import monotonic

import redis

from vllm_mmcache.base.errors import StoreCorrupt, StoreKeyMismatch, StoreUnusable
from vllm_mmcache.base.store_url import error_without_secrets, redact
from vllm_mmcache.components.features.lasting import name_of
from vllm_mmcache.components.features.package import unpack
from vllm_mmcache.components.features.remote import INCOMING, PREFIX
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.frame import unframe
from vllm_mmcache.storage.records.remote import PREFIX as RECORDS
from vllm_mmcache.storage.redis_nodes import Nodes, open_value

TIMEOUT_S = 5.0
AT_ONCE = 500
# Of every format, also of other versions of mmcache.
PACKAGES_OF_ALL = "mmcache:features:*"
RECORDS_OF_ALL = "mmcache:records:*"


class RemoteStore:
    """The entries at `url`. Raises: StoreUnusable from every method, where the server does not answer as it should."""

    def __init__(self, url: str, codec: PlainCodec = PLAIN) -> None:
        self._codec = codec
        self._url = url
        self.shown = str(redact(url))
        self._nodes = Nodes(url, TIMEOUT_S, self.shown)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """By kind, packages or records: how many entries there are, and their bytes."""
        with self._asked():
            kinds = {"packages": PACKAGES_OF_ALL, "records": RECORDS_OF_ALL}
            lengths = {kind: list(self._lengths(pattern)) for kind, pattern in kinds.items()}
        return {kind: (len(found), sum(found)) for kind, found in lengths.items()}

    def check(self) -> tuple[int, int]:
        """Remove every entry of this version that is not whole; what another key has encrypted is left alone.

        Returns how many are good, how many were removed.
        """
        with self._asked():
            verdicts = list(self._verdicts())
            for client, name, is_whole in verdicts:
                if is_whole is False:
                    client.unlink(name)
        found = [is_whole for *_, is_whole in verdicts]
        return found.count(True), found.count(False)

    def clear(self) -> int:
        """Remove all that is ours; returns the number of entries."""
        removed = 0
        with self._asked():
            for pattern in (PACKAGES_OF_ALL, RECORDS_OF_ALL):
                for client, names in self._batches(pattern):
                    removed += sum(_each(client, "unlink", names))
        return removed

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            said = error_without_secrets(error, self._url)
            raise StoreUnusable(f"{self.shown}: {said}: is it running, and is its password in the URL?") from None

    def _batches(self, pattern: str) -> Iterator[tuple["redis.Redis", list[bytes]]]:
        """Names that match, once each, with the node that has them."""
        for client in self._nodes.primaries():
            seen: set[bytes] = set()  # SCAN may give a name twice

            def names(client: "redis.Redis" = client, seen: set[bytes] = seen) -> Iterator[bytes]:
                for name in client.scan_iter(match=pattern, count=AT_ONCE):
                    if name not in seen:
                        seen.add(name)
                        yield name

            found = names()
            while batch := list(islice(found, AT_ONCE)):
                yield client, batch

    def _lengths(self, pattern: str) -> Iterator[int]:
        for client, names in self._batches(pattern):
            yield from _each(client, "strlen", names)

    def _verdicts(self) -> Iterator[tuple["redis.Redis", bytes, bool | None]]:
        """Each entry's node and name, and whether it is whole; None where that can't be said (encrypted, or gone)."""
        for prefix, is_whole in ((PREFIX, self._is_whole_package), (RECORDS, self._is_whole_record)):
            for client, names in self._batches(prefix + "*"):
                for name in names:
                    if name.startswith(INCOMING.encode()):
                        continue
                    try:
                        text = name.decode()
                        verdict = is_whole(client, bytes.fromhex(text.removeprefix(prefix)), text)
                    except StoreKeyMismatch:
                        verdict = None
                    except (StoreCorrupt, ValueError):  # also for a name that is no number in base 16
                        verdict = False
                    yield client, name, verdict

    def _is_whole_package(self, client: "redis.Redis", short: bytes, name: str) -> bool | None:
        packed = self._content(client, short, name)
        return None if packed is None else name_of(unpack(packed)[0], self._codec) == short.hex()

    def _is_whole_record(self, client: "redis.Redis", short: bytes, name: str) -> bool | None:
        framed = self._content(client, short, name)
        return None if framed is None else unframe(short, bytes(framed)) is not None

    def _content(self, client: "redis.Redis", short: bytes, name: str) -> bytearray | None:
        with open_value(client, name, TIMEOUT_S) as value:
            if value is None:
                return None
            source = self._codec.opened(value, short)
            content = bytearray(source.num_bytes)
            source.read_into(0, memoryview(content), monotonic() + TIMEOUT_S * AT_ONCE)
            return content


def _each(client: "redis.Redis", command: str, names: list[bytes]) -> list[int]:
    """What the command answers for each name; names of other types than it is for are left out.

    Raises: ResponseError for what this user may not do.
    """
    with client.pipeline(transaction=False) as together:
        for name in names:
            getattr(together, command)(name)
        answers = together.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, redis.exceptions.NoPermissionError):
            raise answer
    return [answer for answer in answers if isinstance(answer, int)]
