# SPDX-License-Identifier: Apache-2.0
"""What the uuids of clients stand for: tenant, modality and uuid -> content id. API server process, any thread.

An alias is bound by a request that carries the item, and used by later ones of the same tenant that carry the uuid
alone. It only leads to a content id; what is kept under that is another matter. Neither uuids nor salts are kept.
"""

from vllm_mmcache import settings
from vllm_mmcache.bounded import Bounded, Budget, Size
from vllm_mmcache.identity import audit, layout
from vllm_mmcache.metrics import counters, sizes

ALIAS_COST_BYTES = 512  # a key of 32 bytes, a content id of 64 characters and the table's slot; twice, see _holders


def _budget() -> Budget:
    entries = settings.current().image_aliases
    return Budget(entries, entries * ALIAS_COST_BYTES)


class Aliases:
    """A bounded table; the alias used longest ago goes first, whosever it is."""

    def __init__(self) -> None:
        self._content_ids: Bounded[bytes, str] = Bounded(_budget, ALIAS_COST_BYTES)
        self._holders: Bounded[bytes, bytes] = Bounded(_budget, ALIAS_COST_BYTES)  # name -> its last tenant's key

    def bind(self, modality: str, name: str, salt: str | None, content_id: str) -> None:
        """From now on `name` stands for this content to this tenant; another one before is counted."""
        key = layout.alias_key(modality, name, salt)
        former = self._content_ids.replace(key, content_id)
        self._holders.replace(layout.alias_key(modality, name), key)
        if former is not None and former != content_id:
            audit.note(counters.ALIASES_REBOUND, "a client gave the uuid of one image to another")

    def find(self, modality: str, name: str, salt: str | None) -> str | None:
        """The content id that `name` stands for to this tenant; None where it stands for nothing."""
        key = layout.alias_key(modality, name, salt)
        found = self._content_ids.get(key)
        holder = self._holders.get(layout.alias_key(modality, name))
        if found is None and holder is not None and holder != key:
            audit.note(counters.ALIASES_OF_OTHERS, "a client asked about an image by a uuid of another tenant")
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._content_ids.clear()
        self._holders.clear()

    def __len__(self) -> int:
        return len(self._content_ids)

    def size(self) -> Size:
        """Of both tables together; the entries are those of the aliases."""
        ids, holders = self._content_ids.size(), self._holders.size()
        return Size(len(self), (ids.bytes or 0) + (holders.bytes or 0), 2 * (ids.budget_bytes or 0))


ALIASES = Aliases()
sizes.of_server("uuids", ALIASES.size)
