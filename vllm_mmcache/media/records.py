# SPDX-License-Identifier: Apache-2.0
"""What the process knows about image bytes that it has decoded once: size, mode, settings, mm_hashes. No pixels.

API server process, any thread. A record exists only for bytes that decoded successfully under the same settings, so
an image that is known would decode again. The table is bounded by entries and bytes.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_mmcache import settings
from vllm_mmcache.bounded import Bounded, Budget

MAX_MM_HASHES = 16  # per record: a server sees one or two (model, processor arguments) per image
RECORD_COST_BYTES = 6144  # a record with all its mm_hashes; measured in tests/media


class Key(NamedTuple):
    """The bytes and everything else that the decoded image depends on."""

    content_id: bytes
    options: tuple[Hashable, ...]


@dataclass
class Record:
    """One known image. Units: size is (width, height) in pixels, after conversion and rotation."""

    size: tuple[int, int]
    mode: str
    io_config: dict[str, Any] | None
    _mm_hashes: dict[Hashable, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def mm_hash(self, question: Hashable) -> str | None:
        """vLLM's mm_hash of this image for `question`, which stands for everything else that is hashed with it."""
        return self._mm_hashes.get(question)

    def keep_mm_hash(self, question: Hashable, mm_hash: str) -> None:
        """Remember the answer; the oldest goes when there are too many."""
        with self._lock:
            self._mm_hashes[question] = mm_hash
            if len(self._mm_hashes) > MAX_MM_HASHES:
                del self._mm_hashes[next(iter(self._mm_hashes))]


def _budget() -> Budget:
    return Budget(settings.current().media_records, settings.current().media_records_bytes)


RECORDS: Bounded[Key, Record] = Bounded(_budget, RECORD_COST_BYTES)
