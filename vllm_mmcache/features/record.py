# SPDX-License-Identifier: Apache-2.0
"""The record at the head of a package's bytes: what it says it is, without its tensors.

The command line lists a store by these alone, without torch. A record that can be read is not yet a whole package:
only `package.unpack` looks at the tensors and the checksum. Runs in any process; never trusts what it reads.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from vllm_mmcache.errors import StoreCorrupt
from vllm_mmcache.features.identity import Identity

FORMAT = "vllm-mmcache features 1"
LENGTH = Struct("<Q")
"""The bytes before the safetensors header: its length."""
MAX_HEADER_BYTES = 1024**2


@dataclass(frozen=True)
class Record:
    """What a package says it is: identity, {"dtype", "shape", "num_bytes"} of each tensor, and the checksum."""

    identity: Identity
    tensors: dict[str, dict[str, Any]]
    text: str
    """The record as written, which the checksum covers."""
    checksum: str


def read_head(path: Path) -> Record:
    """The record of a file, without reading its tensors. Raises: OSError, and StoreCorrupt as `read_record`."""
    with path.open("rb") as file:
        head = file.read(LENGTH.size)
        if len(head) == LENGTH.size:
            head += file.read(min(LENGTH.unpack(head)[0], MAX_HEADER_BYTES))
    return read_record(head)


def read_record(packed: bytes) -> Record:
    """The record of a package, or of its beginning up to the end of the header.

    Raises: StoreCorrupt for what is no package of this format; the message names an other format version.
    """
    try:
        (length,) = LENGTH.unpack_from(packed)
        if length > MAX_HEADER_BYTES:  # parsing it would take the time that it was to save
            raise ValueError(f"a header of {length} bytes")
        metadata = json.loads(packed[LENGTH.size : LENGTH.size + length])["__metadata__"]
        seen = str(metadata["format"])
    except Exception as error:  # bytes from outside: whatever the parser raises, they are no package
        raise StoreCorrupt(f"no package: {type(error).__name__}: {error}"[:200]) from None
    if seen != FORMAT:
        raise StoreCorrupt(f"format {seen[:80]!r}, expected {FORMAT!r}")
    try:
        fields = json.loads(metadata["record"])
        identity = Identity(**fields["identity"])
        identity.key  # noqa: B018  raises for a field that is no text
        return Record(identity, dict(fields["tensors"]), metadata["record"], metadata["blake3"])
    except Exception as error:
        raise StoreCorrupt(f"its record can't be read: {type(error).__name__}: {error}"[:200]) from None
