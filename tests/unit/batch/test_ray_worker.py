# SPDX-License-Identifier: Apache-2.0
"""vLLM's chat_utils under the name that Ray 2.60 imports them by."""

import importlib
import sys
from collections.abc import Iterator

import pytest

from vllm_mmcache.batch.ray_worker import find_chat_utils

OLD, NEW = "vllm.entrypoints.chat_utils", "vllm.renderers.chat_utils"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before
    sys.modules.pop(OLD, None)


def test_the_module_is_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(OLD)
    find_chat_utils()
    find_chat_utils()
    assert len(sys.meta_path) == len({id(finder) for finder in sys.meta_path})
    old, new = importlib.import_module(OLD), importlib.import_module(NEW)
    assert old is new
    assert new.__spec__ is not None
    assert new.__spec__.name == NEW
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vllm.entrypoints.nonesuch")
