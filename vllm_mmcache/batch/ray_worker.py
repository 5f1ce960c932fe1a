# SPDX-License-Identifier: Apache-2.0
"""What Ray's own multimodal stage needs beside vLLM 0.32 and later, in each of Ray's workers.

    ray.init(runtime_env={"worker_process_setup_hook": "vllm_mmcache.batch.ray_worker.find_chat_utils"})

Ray 2.60 imports vllm.entrypoints.chat_utils, which has become vllm.renderers.chat_utils. Jobs whose rows
vllm_mmcache.batch.question makes do without that stage, and without this. Imports nothing of vLLM before Ray does.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OLD, _NEW = "vllm.entrypoints.chat_utils", "vllm.renderers.chat_utils"


class _Moved(MetaPathFinder, Loader):
    """Finds the module under its old name, after all others have looked for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == _OLD else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of the empty one."""
        sys.modules[module.__name__] = importlib.import_module(_NEW)


def find_chat_utils() -> None:
    """Have this process find vLLM's chat_utils under the name that Ray knows. A second call changes nothing."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
