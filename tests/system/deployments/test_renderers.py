# SPDX-License-Identifier: Apache-2.0
"""Another renderer than HfRenderer: what a third party's goes past is not said to be on, nor started where required."""

from pathlib import Path

import pytest

from tests.support.deployment import Answer, deployed, installed_plugin, refused
from tests.support.sizes import larger

pytestmark = pytest.mark.engine

PLUGIN = """
def register():
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    RENDERER_REGISTRY.register("third", "third_party_renderer", "ThirdRenderer")
    TokenizerRegistry.register("third", "vllm.tokenizers.hf", "CachedHfTokenizer")
"""
RENDERER = """
from vllm.renderers.hf import HfRenderer

class ThirdRenderer(HfRenderer):
    def _process_tokens(self, prompt, *, skip_mm_cache=False):
        inputs = self._process_multimodal(
            prompt["prompt_token_ids"], prompt["multi_modal_data"], mm_uuids=prompt.get("multi_modal_uuids"),
            mm_processor_kwargs=prompt.get("mm_processor_kwargs"), skip_mm_cache=skip_mm_cache,
        )
        return inputs | {"cache_salt": prompt["cache_salt"]} if prompt.get("cache_salt") else inputs

    async def _process_tokens_async(self, prompt, *, skip_mm_cache=False):
        return self._process_tokens(prompt, skip_mm_cache=skip_mm_cache)
"""


@larger
def test_of_a_third_party(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    path = installed_plugin(tmp_path / "path", "third_party", PLUGIN)
    (path / "third_party_renderer.py").write_text(RENDERER)
    with deployed(model, tmp_path / "log", "--tokenizer-mode", "third", paths=[path]) as server:
        components = server.components()
        assert components["identity"] == ("off", "the renderer ThirdRenderer is not vLLM's and may go past it")
        assert components["image_extraction"] == ("off", "not shown to be right with the renderer ThirdRenderer")
        (line,) = server.in_force()
        assert "identity (the renderer ThirdRenderer is not vLLM's" in line
        assert server.ask(0).equals(stock[0])
        assert server.ask(0).equals(stock[0])
        assert server.ask(1).equals(stock[1])
    said = refused(model, tmp_path / "refused", "--tokenizer-mode", "third", paths=[path])
    assert "require_salt is set, but identity is off (the renderer ThirdRenderer" in said


@larger
def test_another_of_vllm(model: Path, tmp_path: Path) -> None:
    """DeepSeek's; its prompts are not this model's, so what it answers is of no interest here."""
    with deployed(model, tmp_path / "log", "--tokenizer-mode", "deepseek_v32", MMCACHE_REQUIRE_SALT="1") as server:
        components = server.components()
        assert components["identity"] == components["lazy_media"] == ("on", "")
        assert components["image_extraction"] == ("off", "not shown to be right with the renderer DeepseekV32Renderer")
