# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of weights on a GPU."""

import pytest
import torch

from tests.support.tiers import LONG_S
from tests.unit.components.features.worker.test_weights import Model, Rig, of, rig
from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.components.features.worker.weights import Fingerprints

__all__ = ["rig"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same fingerprint as on the CPU, though kernels that write the weights are still to run."""
    from vllm_mmcache.content import digests

    monkeypatch.setattr(digests, "PIECE_BYTES", 12)
    rig.model.fill(0.5)
    expected = of(rig.tower)
    model = Model().cuda()
    model.fill(3)
    fingerprints = Fingerprints(Tower(model), lambda *row: None)
    busy = torch.rand(4096, 4096, device="cuda")
    with fingerprints.changing():
        for _ in range(50):
            busy = busy @ busy
        model.fill(0.5)
    assert fingerprints.wait(LONG_S)
    assert fingerprints.fingerprint == expected
    fingerprints.close()
