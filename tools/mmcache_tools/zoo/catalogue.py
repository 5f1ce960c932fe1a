# SPDX-License-Identifier: Apache-2.0
"""Every family of the zoo, by name. Data from the standard library alone, so that listing them is free."""

from __future__ import annotations

from mmcache_tools.zoo import families
from mmcache_tools.zoo.configs import ZooOptions
from mmcache_tools.zoo.family import Family
from mmcache_tools.zoo.gemma4 import GEMMA4, GEMMA4_CAUSAL
from mmcache_tools.zoo.glm4v import GLM4V
from mmcache_tools.zoo.internvl import INTERNVL
from mmcache_tools.zoo.lfm2_vl import LFM2_VL
from mmcache_tools.zoo.minicpm_v import MINICPM_V
from mmcache_tools.zoo.mistral3 import MISTRAL3
from mmcache_tools.zoo.paligemma import PALIGEMMA
from mmcache_tools.zoo.qwen_moe import QWEN_MOE

_MORE: tuple[Family, ...] = (GEMMA4, GEMMA4_CAUSAL, *QWEN_MOE, INTERNVL, GLM4V, MISTRAL3, MINICPM_V, LFM2_VL)
_REFUSED: tuple[Family, ...] = (PALIGEMMA,)

BY_NAME: dict[str, Family] = {family.name: family for family in (*families.FIRST, *_MORE, *_REFUSED, *families.TRAINED)}
# Random weights: one for each architecture. CI runs the whole matrix on the first ones, `make matrix` on all.
FIRST_FAMILIES: tuple[str, ...] = tuple(family.name for family in families.FIRST)
MORE_FAMILIES: tuple[str, ...] = tuple(family.name for family in _MORE)
FAMILIES: tuple[str, ...] = FIRST_FAMILIES + MORE_FAMILIES
# Models that vLLM runs wrongly and mmcache refuses; no test of answers runs them.
REFUSED: tuple[str, ...] = tuple(family.name for family in _REFUSED)
TRAINED: tuple[str, ...] = tuple(family.name for family in families.TRAINED)


def architecture_of(family: str) -> str:
    """The architecture that a family's config names."""
    return str(BY_NAME[family].config(_AnyId(), 8, ZooOptions())["architectures"][0])


class _AnyId(dict[str, int]):
    def __missing__(self, token: str) -> int:
        return 0
