# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the real architectures, for tests, benchmarks and the demo.

Each has the real configuration classes, processor, special tokens and a chat template of the family's
behaviour, with random weights of 4 to 5 million parameters, so Transformers is a full oracle for it and no
download is needed. The text they write is nonsense, but it depends on every picture in the prompt. One more, `seeing`,
was trained and comes with its weights: it names what is in pictures of coloured shapes.
Importing this package loads neither torch nor Transformers; building a model does.
"""

from mmcache_tools.zoo.build import FORMAT_VERSION, build, build_cached
from mmcache_tools.zoo.catalogue import (
    BY_NAME,
    FAMILIES,
    FIRST_FAMILIES,
    MORE_FAMILIES,
    REFUSED,
    TRAINED,
    architecture_of,
)
from mmcache_tools.zoo.configs import ZooOptions

__all__ = [
    "BY_NAME",
    "FAMILIES",
    "FIRST_FAMILIES",
    "FORMAT_VERSION",
    "MORE_FAMILIES",
    "REFUSED",
    "TRAINED",
    "ZooOptions",
    "architecture_of",
    "build",
    "build_cached",
]
