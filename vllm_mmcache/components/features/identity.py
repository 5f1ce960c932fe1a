# SPDX-License-Identifier: Apache-2.0
"""What a package's features depend on, and the key made of it.

    key = BLAKE3(MAGIC || for each field, in the order below: u32 length || UTF-8 bytes), as 64 hex digits

Lengths are little endian, so no two identities have the same bytes. Names of files and of Redis entries are made from
the key alone: no text that a client chose ever reaches a path. Runs in any process; imports no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from struct import Struct

from blake3 import blake3

FORMAT = 2
"""Of features: raise it when a package's bytes change, or what features of an identity are, and KEY_FORMAT with it.

It is in the package's head.
"""
KEY_FORMAT = 1
"""Of keys, in which it is: raise it with FORMAT, and when a key is made of other bytes.

So versions of another format look elsewhere in the same store: neither finds the other's packages, nor takes them for
damaged ones.
"""
MAGIC = b"vllm-mmcache feature key %d\0" % KEY_FORMAT

_U32 = Struct("<I")
_JSON_NAMES = {"identifier": "content_id"}  # those that differ from the field's


@dataclass(frozen=True)
class Identity:
    """Everything that features of one image or video depend on; two that differ in one field never share a package."""

    identifier: str
    """vLLM's identifier of the item (mm_hash), tenant included; any text, also a hostile one. `content_id` in JSON."""
    model: str
    """Fingerprint of the vision weights as loaded."""
    processor: str
    """Digest of the processor's settings; of a video another one, too, of what is for videos."""
    dtype: str
    """The features' dtype, such as bfloat16."""
    layout: str
    """How ranks share the tower and how many there are, "mm_encoder_tp_mode/size", such as weights/2."""

    @cached_property
    def key(self) -> str:
        """64 hex digits, the same in every process and on every machine."""
        digest = blake3(MAGIC)
        for text in (self.identifier, self.model, self.processor, self.dtype, self.layout):  # astuple would copy
            # A lone surrogate can come from JSON; it must not raise, and must stay distinct.
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(_U32.pack(len(encoded)) + encoded)
        return digest.hexdigest()

    def as_json(self) -> dict[str, str]:
        """The fields as a package's head has them, where the identifier is called content_id."""
        return {_JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, str]) -> "Identity":
        """The identity that a package's head has. Raises: TypeError or KeyError for other fields than those."""
        others = {**fields}
        return cls(identifier=others.pop(_JSON_NAMES["identifier"]), **others)
