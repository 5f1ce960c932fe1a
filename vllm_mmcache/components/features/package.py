# SPDX-License-Identifier: Apache-2.0
"""One image's features as bytes: a safetensors file with one tensor, whose head says whose they are.

    u64 length || JSON header, padded with spaces to a multiple of 8 bytes || the features

The header's metadata has three texts: `format`, `record` (JSON: the identity of docs/features.md, dtype, shape) and
`blake3`, over the bytes of the record, then those of the features. The tensor is `features`, (num_tokens, hidden * (1
+ num_deepstack)). A head is the one that this module writes for its record and checksum, or it is none: so every byte
is checked. What does not fit raises StoreCorrupt, whatever the bytes are. Features are bytes here, and are never
copied. Any process; imports neither torch nor numpy.
"""

import json
import math
import os
from dataclasses import dataclass
from struct import Struct

from blake3 import blake3

from vllm_mmcache.base.errors import StoreCorrupt, StoreForeign
from vllm_mmcache.components.features.identity import FORMAT as FORMAT_NUMBER
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.storage.backend import Buffer, Source

_FORMATS = "vllm-mmcache features "
FORMAT = f"{_FORMATS}{FORMAT_NUMBER}"
FEATURES = "features"
LENGTH = Struct("<Q")
"""The bytes before the header: its length."""
MAX_HEADER_BYTES = 1024**2
DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4), "float64": ("F64", 8)}
"""By torch's name: the name in safetensors, and bytes."""

_ALIGNMENT = 8
# Below this, threads cost more than they save; above it, some of a machine's many cores are well spent.
_THREADED_BYTES = 4 * 1024**2
_MAX_THREADS = 4
_CORES_PER_THREAD = 4


@dataclass(frozen=True)
class Shape:
    """What one image's features look like. Raises: ValueError for sizes below 0, or a dtype that is not in DTYPES."""

    num_tokens: int
    width: int
    """Hidden size * (1 + num_deepstack)."""
    dtype: str
    """As torch names it, such as bfloat16."""

    def __post_init__(self) -> None:
        for size in (self.num_tokens, self.width):
            if type(size) is not int or size < 0:
                raise ValueError(f"a size of {size!r}, expected a whole number")
        if self.dtype not in DTYPES:
            raise ValueError(f"features of dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the features alone, (num_tokens, width) of dtype, without a head."""
        return self.num_tokens * self.width * DTYPES[self.dtype][1]

    def __str__(self) -> str:
        return f"({self.num_tokens}, {self.width}) {self.dtype}"


@dataclass(frozen=True)
class Record:
    """What the head of a package says: whose features follow, and their checksum."""

    identity: Identity
    shape: Shape
    checksum: str
    """64 hex digits."""

    @property
    def text(self) -> str:
        """The record as it is written, in ASCII; the checksum covers it."""
        fields = {
            "identity": self.identity.as_json(),
            "dtype": self.shape.dtype,
            "shape": [self.shape.num_tokens, self.shape.width],
        }
        return json.dumps(fields, separators=(",", ":"))

    def head(self) -> bytes:
        """The bytes before the features; their number does not depend on the checksum."""
        tensor = {
            "dtype": DTYPES[self.shape.dtype][0],
            "shape": [self.shape.num_tokens, self.shape.width],
            "data_offsets": [0, self.shape.num_bytes],
        }
        metadata = {"format": FORMAT, "record": self.text, "blake3": self.checksum}
        header = json.dumps({"__metadata__": metadata, FEATURES: tensor}, separators=(",", ":")).encode()
        header += b" " * (-(LENGTH.size + len(header)) % _ALIGNMENT)
        return LENGTH.pack(len(header)) + header


def head(identity: Identity, shape: Shape, features: Buffer) -> bytes:
    """The bytes before these features, `shape.num_bytes` of them, in a file and in Redis.

    Raises: ValueError for another number of bytes.
    """
    if len(features) != shape.num_bytes:
        raise ValueError(f"{len(features)} bytes of features, expected {shape.num_bytes} for {shape}")
    digest = _digest(Record(identity, shape, ""))
    digest.update(features)
    return Record(identity, shape, digest.hexdigest()).head()


def pack(identity: Identity, shape: Shape, features: Buffer) -> bytes:
    """A package as one text of bytes; the tiers write head and features one after the other. Raises: as `head`."""
    return head(identity, shape, features) + features


def unpack(packed: Buffer) -> tuple[Identity, Shape, memoryview]:
    """Check every byte, and give back what they hold; the features are a view.

    Raises: StoreCorrupt when anything is off.
    """
    data = memoryview(packed)
    record = read_record(data)
    check = Check(record.identity, record.shape)
    check.begin(data[: check.num_head_bytes], len(data))
    features = data[check.num_head_bytes :]
    check.add(features)
    check.end()
    return record.identity, record.shape, features


class Check:
    """Checks a package as it arrives: `begin` with its head, `add` the features in pieces, `end`."""

    def __init__(self, identity: Identity, shape: Shape) -> None:
        self._asked = Record(identity, shape, "0" * 64)
        self._digest = _digest(self._asked)
        self._checksum = ""
        self.num_head_bytes = len(self._asked.head())
        """Bytes that its head must have."""
        self.num_bytes = shape.num_bytes
        """Bytes of the features."""

    def begin(self, seen: Buffer, num_bytes: int) -> None:
        """Look at the first bytes of a package of `num_bytes` in all.

        seen: `num_head_bytes` of them or more, or all that there are.
        Raises: StoreCorrupt where they are not the head of what is asked for.
        """
        record = read_record(seen)
        asked = self._asked
        if record.identity != asked.identity:
            raise StoreCorrupt(
                f"another package: its identity gives the key {record.identity.key}, asked was {asked.identity.key}"
            )
        if record.shape != asked.shape:
            raise StoreCorrupt(f"features {record.shape}, this model's are {asked.shape}")
        expected = self.num_head_bytes + asked.shape.num_bytes
        if num_bytes != expected:
            raise StoreCorrupt(f"{num_bytes} bytes, expected {expected}")
        self._checksum = record.checksum

    def add(self, piece: Buffer) -> None:
        """The next bytes of the features."""
        self._digest.update(piece)

    def end(self) -> None:
        """All of them came. Raises: StoreCorrupt where the checksum is another one."""
        if self._digest.hexdigest() != self._checksum:
            raise StoreCorrupt("the checksum does not fit the bytes")


def read_record(packed: Buffer) -> Record:
    """The record of a package, or of its beginning up to the end of the head or further.

    A record that can be read is not yet a whole package: only `Check` looks at the features.
    Raises: StoreCorrupt for what is no head of this format; StoreForeign for one of another version's.
    """
    data = memoryview(packed)
    try:
        (length,) = LENGTH.unpack_from(data)
        if length > MAX_HEADER_BYTES:  # parsing it would take the time that it was to save
            raise ValueError(f"a header of {length} bytes")
        metadata = json.loads(bytes(data[LENGTH.size : LENGTH.size + length]))["__metadata__"]
        seen = str(metadata["format"])
    except Exception as error:  # bytes from outside: whatever the parser raises, they are no package
        raise StoreCorrupt(f"no package: {type(error).__name__}: {error}"[:200]) from None
    if seen != FORMAT:
        kind = StoreForeign if seen.startswith(_FORMATS) else StoreCorrupt
        raise kind(f"format {seen[:80]!r}, expected {FORMAT!r}")
    try:
        fields = json.loads(metadata["record"])
        identity = Identity.from_json(fields["identity"])
        identity.key  # noqa: B018  raises for a field that is no text
        num_tokens, width = fields["shape"]
        record = Record(identity, Shape(num_tokens, width, fields["dtype"]), str(metadata["blake3"]))
        expected = record.head()
    except Exception as error:
        raise StoreCorrupt(f"its record can't be read: {type(error).__name__}: {error}"[:200]) from None
    if data[: len(expected)] != expected:
        raise StoreCorrupt("its head is not the one of its record")
    return record


def read_head(source: Source) -> Record:
    """The record of a package, without reading its features. Raises: as `source`, and StoreCorrupt as `read_record`."""
    first = bytearray(min(source.num_bytes, LENGTH.size))
    source.read_into(0, memoryview(first), math.inf)
    if len(first) == LENGTH.size:
        first += bytes(min(source.num_bytes - len(first), LENGTH.unpack(first)[0], MAX_HEADER_BYTES))
        source.read_into(0, memoryview(first), math.inf)
    return read_record(first)


def _digest(record: Record) -> blake3:
    threads = 1
    if record.shape.num_bytes >= _THREADED_BYTES:
        threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))
    return blake3(record.text.encode(), max_threads=threads)
