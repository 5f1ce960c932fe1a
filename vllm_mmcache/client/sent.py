# SPDX-License-Identifier: Apache-2.0
"""Which images a server has been sent, for one kind of request and one user. The client's process, any thread.

A hint only: the server may have forgotten, and says so. Where that happens again and again, it is several servers
behind one name, and for a while images are sent whole. Ids and digests are kept, neither images nor API keys.
"""

import threading
from collections.abc import Iterable

from vllm_mmcache.base.lru import Budget, LruTable

ENTRY_BYTES = 512  # an id, a digest of 32 bytes, their tuple and the table's slot

_MISSES = 2  # so many, one after the other, are not a server that was started anew
_MOST_WHOLE = 64  # requests that are sent whole before names are tried again


class Sent:
    """The images that were sent last. May be shared by several transports. Units: max_images over all servers."""

    def __init__(self, max_images: int = 65536) -> None:
        budget = Budget(max_images, max_images * ENTRY_BYTES)
        self._images: LruTable[tuple[bytes, str], bool] = LruTable(lambda: budget, ENTRY_BYTES)
        self._misses: dict[str, int] = {}  # by host: refusals since a name was last accepted
        self._whole: dict[str, int] = {}  # by host: requests that are still to be sent whole
        self._lock = threading.Lock()

    def known(self, scope: bytes, ids: Iterable[str]) -> frozenset[str]:
        """Those of `ids` that were sent within `scope`."""
        return frozenset(one for one in ids if self._images.get((scope, one)))

    def remember(self, scope: bytes, ids: Iterable[str]) -> None:
        """The server has answered a request with these images. May forget others, least recently used first."""
        for one in ids:
            self._images.admit((scope, one), True)

    def accepted(self, host: str) -> None:
        """A host has answered a request with names in place of images."""
        with self._lock:
            self._misses.pop(host, None)

    def missed(self, host: str) -> None:
        """A host has refused a request with names, and accepted the same with all bytes."""
        with self._lock:
            misses = self._misses[host] = self._misses.get(host, 0) + 1
            if misses >= _MISSES:
                self._whole[host] = min(2 ** (misses - 1), _MOST_WHOLE)

    def goes_whole(self, host: str) -> bool:
        """Whether this request, which could have names, is better sent with all bytes. Counts it if so."""
        with self._lock:
            left = self._whole.get(host, 0)
            if left > 1:
                self._whole[host] = left - 1
            else:
                self._whole.pop(host, None)
            return left > 0

    def __len__(self) -> int:
        return len(self._images)
