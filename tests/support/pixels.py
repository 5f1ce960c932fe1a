# SPDX-License-Identifier: Apache-2.0
"""Counts what makes pixels, in each process of an engine by itself."""

from typing import Any

import pytest
from mmcache_tools.harness.engines import ZooRig

from vllm_mmcache.components.lazy_processing import vllm_pixels, vllm_processor


class Processed:
    """Calls of the processor for items that came without pixels, in the engine's process and in its ranks'."""

    def __init__(self, rig: ZooRig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rig = rig
        self._num_calls = 0
        process = vllm_processor.process

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_calls += 1
            return process(*args, **kwargs)

        monkeypatch.setattr(vllm_pixels, "process", counted)
        self._before = self._made_in_ranks()

    def in_engine(self) -> int:
        """Calls in this process, of which one thread or another makes them."""
        return self._num_calls

    def in_ranks(self) -> list[int]:
        """Items that each rank has completed in its steps."""
        return [now - before for now, before in zip(self._made_in_ranks(), self._before, strict=True)]

    def _made_in_ranks(self) -> list[int]:
        return list(self._rig.in_workers(made_late))


def made_late(worker: Any) -> int:
    """Items that this worker has made the pixels of since it started."""
    from vllm_mmcache.metrics import counters

    return int(counters.PIXELS_MADE_LATE.value)
