# SPDX-License-Identifier: Apache-2.0
"""What a renderer makes of the components of an API server."""

import sys

import pytest
from vllm.renderers.base import BaseRenderer
from vllm.renderers.deepseek_v32 import DeepseekV32Renderer
from vllm.renderers.hf import HfRenderer

from vllm_mmcache.base.status import State
from vllm_mmcache.lifecycle.report import with_renderer


class Passing(HfRenderer):
    """A third party's that leaves vLLM's way as it is."""


class Bypassing(HfRenderer):
    """A third party's that goes past it."""

    def _process_tokens(self, *args: object, **kwargs: object) -> None:
        """As vLLM's does, without what stands around it."""


def test_what_a_renderer_switches_off() -> None:
    def extraction(name: str) -> State:
        return State("off", f"not shown to be right with the renderer {name}")

    def identity(name: str) -> State:
        return State("off", f"the renderer {name} is not vLLM's and may go past it")

    assert with_renderer(HfRenderer) == {}
    assert with_renderer(HfRenderer, is_ours=False) == {"identity": identity("HfRenderer")}
    assert with_renderer(DeepseekV32Renderer) == {"image_extraction": extraction("DeepseekV32Renderer")}
    assert with_renderer(Passing) == {"image_extraction": extraction("Passing")}
    assert with_renderer(Bypassing) == {
        "image_extraction": extraction("Bypassing"),
        "identity": identity("Bypassing"),
    }


@pytest.mark.parametrize("is_importable", [True, False])
def test_where_identity_does_not_fit_this_vllm(is_importable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off for that reason, which is no mistake of the renderer."""
    if is_importable:
        monkeypatch.delattr(BaseRenderer, "_process_tokens")
    else:
        monkeypatch.setitem(sys.modules, "vllm_mmcache.components.identity.hooks", None)
    assert with_renderer(HfRenderer) == {}
