# SPDX-License-Identifier: Apache-2.0
"""Lets a CUDA build of torchvision be imported beside a CPU torch: the text of the start-up hook.

`environment.repair` copies this file into site-packages as `_mmcache_torchvision_hook.py`, with the two
versions filled in, and a `.pth` file beside it imports it in every Python process of that environment. It
must work alone (vllm_mmcache may be gone), cost next to nothing (torch is imported only when torchvision is),
and do nothing beside any other pair of builds: a torchvision that brings its own operators would fail on
ours.
"""

import importlib.machinery
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# Filled in by the repair. The versions are those in */version.py, which name the build (0.28.0+cu130), as the
# distributions' metadata doesn't.
TORCH = ""
TORCHVISION = ""

# The operators that torchvision/_meta_registrations.py and its fakes expect; their kernels are never called
# by the pure Python transforms that image processors use.
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def installed_version(package: str) -> str | None:
    """The version written in a package's version.py, found without importing the package."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    if spec is None or not spec.origin:
        return None
    try:
        with open(spec.origin.replace("__init__.py", "version.py"), encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return None
    found = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


class SchemaFinder:
    """A meta-path finder that finds nothing, but defines the operators before torchvision is imported."""

    library: Any = None  # kept: torch takes the definitions back when the object dies

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for every name, so that other finders look; before torchvision, once, it defines the operators."""
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            if installed_version("torchvision") == TORCHVISION and installed_version("torch") == TORCH:
                import torch.library

                SchemaFinder.library = torch.library.Library("torchvision", "DEF")
                for schema in SCHEMAS:
                    SchemaFinder.library.define(schema)
        return None


if TORCH and TORCHVISION:
    sys.meta_path.insert(0, SchemaFinder())
