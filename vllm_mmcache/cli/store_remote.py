# SPDX-License-Identifier: Apache-2.0
"""What `mmcache store` does in Redis or Valkey: count, check and remove what is ours, and nothing else there.

Names are found by SCAN, which keeps nobody waiting. Servers may use it meanwhile, and other programs, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from time import monotonic

import redis

from vllm_mmcache.errors import SettingsError, StoreCorrupt, StoreSealed, StoreUnusable
from vllm_mmcache.features.lasting import name_of
from vllm_mmcache.features.package import unpack
from vllm_mmcache.features.remote import INCOMING, PREFIX, connect, open_value
from vllm_mmcache.places import error_without_secrets, without_secrets
from vllm_mmcache.records.framing import unframe
from vllm_mmcache.records.remote import PREFIX as RECORDS
from vllm_mmcache.sealing import CLEAR, Clear

TIMEOUT_S = 5.0
AT_ONCE = 500
# Of every format, also of other versions of mmcache.
PACKAGES_OF_ALL = "mmcache:features:*"
RECORDS_OF_ALL = "mmcache:records:*"


class RemoteStore:
    """The entries at `url`. Raises: StoreUnusable from every method, where the server does not answer as it should."""

    def __init__(self, url: str, key: Clear = CLEAR) -> None:
        self._key = key
        self._url = url
        self.shown = str(without_secrets(url))
        try:
            self._client = connect(url, TIMEOUT_S)
        except (ValueError, TypeError, redis.RedisError) as error:
            raise SettingsError(
                f"store {self.shown!r} is no URL of Redis or Valkey: {error_without_secrets(error, url)}"
            ) from None

    def sizes(self) -> dict[str, tuple[int, int]]:
        """By kind, packages or records: how many entries there are, and their bytes."""
        with self._asked():
            kinds = {"packages": PACKAGES_OF_ALL, "records": RECORDS_OF_ALL}
            lengths = {kind: list(self._lengths(pattern)) for kind, pattern in kinds.items()}
        return {kind: (len(found), sum(found)) for kind, found in lengths.items()}

    def check(self) -> tuple[int, int]:
        """Remove every entry of this version that is not whole; what another key has sealed is left alone.

        Returns how many are good, how many were removed.
        """
        with self._asked():
            verdicts = list(self._verdicts())
            for name, is_whole in verdicts:
                if is_whole is False:
                    self._client.unlink(name)
        return sum(is_whole is True for _, is_whole in verdicts), sum(is_whole is False for _, is_whole in verdicts)

    def clear(self) -> int:
        """Remove all that is ours; returns the number of entries."""
        removed = 0
        with self._asked():
            for pattern in (PACKAGES_OF_ALL, RECORDS_OF_ALL):
                for names in _batches(self._names(pattern)):
                    removed += int(self._client.unlink(*names))
        return removed

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            said = error_without_secrets(error, self._url)
            raise StoreUnusable(f"{self.shown}: {said}: is it running, and is its password in the URL?") from None

    def _names(self, pattern: str) -> Iterator[bytes]:
        seen = set()  # SCAN may give a name twice
        for name in self._client.scan_iter(match=pattern, count=AT_ONCE):
            if name not in seen:
                seen.add(name)
                yield name

    def _lengths(self, pattern: str) -> Iterator[int]:
        for names in _batches(self._names(pattern)):
            with self._client.pipeline(transaction=False) as together:
                for name in names:
                    together.strlen(name)
                yield from (length for length in together.execute(raise_on_error=False) if isinstance(length, int))

    def _verdicts(self) -> Iterator[tuple[bytes, bool | None]]:
        """Each entry's name, and whether it is whole; None where that can't be said (sealed, or gone)."""
        for prefix, is_whole in ((PREFIX, self._is_whole_package), (RECORDS, self._is_whole_record)):
            for name in self._names(prefix + "*"):
                if name.startswith(INCOMING.encode()):
                    continue
                try:
                    text = name.decode()
                    verdict = is_whole(bytes.fromhex(text.removeprefix(prefix)), text)
                except StoreSealed:
                    verdict = None
                except (StoreCorrupt, ValueError):  # also for a name that is no number in base 16
                    verdict = False
                yield name, verdict

    def _is_whole_package(self, short: bytes, name: str) -> bool | None:
        packed = self._content(short, name)
        return None if packed is None else name_of(unpack(packed)[0], self._key) == short.hex()

    def _is_whole_record(self, short: bytes, name: str) -> bool | None:
        framed = self._content(short, name)
        return None if framed is None else unframe(short, bytes(framed)) is not None

    def _content(self, short: bytes, name: str) -> bytearray | None:
        with open_value(self._client, name, TIMEOUT_S) as value:
            if value is None:
                return None
            source = self._key.opened(value, short)
            content = bytearray(source.num_bytes)
            source.read_into(0, memoryview(content), monotonic() + TIMEOUT_S * AT_ONCE)
            return content


def _batches(names: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(names, AT_ONCE)):
        yield batch
