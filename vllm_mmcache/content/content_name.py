# SPDX-License-Identifier: Apache-2.0
"""Names of images that say what they name: the digest of the image's file, with a prefix. Pure; imports no vLLM.

    name = "mmc2-" || hex BLAKE3(file)        with derive_key, context "vllm-mmcache content name 2"

The client transport (client/) gives them as uuids. A server binds such a name to an image only if the digest is that of
the image's file, so that nobody can bind it to anything else, whatever tenant they belong to.
"""

import re

from blake3 import blake3

PREFIX = "mmc2-"
"""The number goes up when the digest covers something else."""
MAX_UUID_CHARS = 128
"""Of a uuid that a client gives an image, be it such a name or any other; longer ones are refused."""

_CONTEXT = "vllm-mmcache content name 2"
_CLAIM = re.compile(r"mmc[0-9]+-")


def name_of(content: bytes) -> str:
    """The name of the image with this file, 69 characters."""
    return PREFIX + blake3(content, derive_key_context=_CONTEXT).hexdigest()


def is_claim(name: str) -> bool:
    """Whether a uuid has the form of such names, of this or another version of them."""
    return _CLAIM.match(name) is not None


def is_readable(name: str) -> bool:
    """Whether a uuid that has that form is of the version that can be compared here."""
    return name.startswith(PREFIX)
