# SPDX-License-Identifier: Apache-2.0
"""What the uuids of clients stand for: tenant, modality and uuid -> content id. API server process, any thread.

A request that has both an item (an image or a video) and a uuid binds the uuid as an alias of the item. Later requests
of the same tenant can send the uuid alone. An alias leads to a content id only: what is stored under that id is found
elsewhere. Uuids and salts themselves are not stored. What is done and counted for a uuid depends only on the aliases of
its own tenant, so nobody can see whether another tenant has it.
"""

from vllm_mmcache.base import settings
from vllm_mmcache.base.lru import Budget, LruTable, Size
from vllm_mmcache.components.identity import audit, identifiers
from vllm_mmcache.metrics import counters, table_sizes

ALIAS_COST_BYTES = 512  # a key of 32 bytes, a content id of 64 characters and the table's slot


def _budget() -> Budget:
    entries = settings.current().image_aliases
    return Budget(entries, entries * ALIAS_COST_BYTES)


class Aliases:
    """A bounded table of all tenants' aliases; the one that was used longest ago is removed first."""

    def __init__(self) -> None:
        self._content_ids: LruTable[bytes, str] = LruTable(_budget, ALIAS_COST_BYTES)

    def bind(self, modality: str, name: str, salt: str | None, content_id: str) -> None:
        """Have `name` stand for this content to this tenant. It is counted if it stood for another content before."""
        key = identifiers.alias_key(modality, name, salt)
        former = self._content_ids.replace(key, content_id)
        if former is not None and former != content_id:
            audit.note(counters.ALIASES_REBOUND, "a client gave the uuid of one image to another")

    def find(self, modality: str, name: str, salt: str | None) -> str | None:
        """The content id that `name` stands for to this tenant; None where it stands for nothing."""
        found = self._content_ids.get(identifiers.alias_key(modality, name, salt))
        if found is None:
            counters.ALIASES_UNKNOWN.add()
        return found

    def knows(self, modality: str, name: str, salt: str | None) -> bool:
        """Whether `name` stands for something to this tenant; it is not counted, and marks nothing as used."""
        return identifiers.alias_key(modality, name, salt) in self._content_ids

    def clear(self) -> None:
        """Forget everything."""
        self._content_ids.clear()

    def __len__(self) -> int:
        return len(self._content_ids)

    def size(self) -> Size:
        """Entries and bytes of the table."""
        return self._content_ids.size()


ALIASES = Aliases()
table_sizes.of_server("uuids", ALIASES.size)
