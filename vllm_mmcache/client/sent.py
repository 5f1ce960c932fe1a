# SPDX-License-Identifier: Apache-2.0
"""Which images a server has been sent, for one kind of request and one user. The client's process, any thread.

A hint only: the server may have forgotten, and says so. Ids and digests are kept, neither images nor API keys.
"""

from collections.abc import Iterable

from vllm_mmcache.base.lru import Budget, LruTable

ENTRY_BYTES = 512  # an id, a digest of 32 bytes, their tuple and the table's slot


class Sent:
    """The images that were sent last. May be shared by several transports. Units: max_images over all servers."""

    def __init__(self, max_images: int = 65536) -> None:
        budget = Budget(max_images, max_images * ENTRY_BYTES)
        self._images: LruTable[tuple[bytes, str], bool] = LruTable(lambda: budget, ENTRY_BYTES)

    def known(self, scope: bytes, ids: Iterable[str]) -> frozenset[str]:
        """Those of `ids` that were sent within `scope`."""
        return frozenset(one for one in ids if self._images.get((scope, one)))

    def remember(self, scope: bytes, ids: Iterable[str]) -> None:
        """The server has answered a request with these images. May forget others, least recently used first."""
        for one in ids:
            self._images.admit((scope, one), True)

    def __len__(self) -> int:
        return len(self._images)
