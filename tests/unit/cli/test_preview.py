# SPDX-License-Identifier: Apache-2.0
"""What a start would give: `mmcache doctor` foresees what a server finds out about its API process."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.base.errors import CausalImages
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.cli import plugins, preview
from vllm_mmcache.components.image_spans import hooks_api
from vllm_mmcache.lifecycle import activation
from vllm_mmcache.lifecycle.config_rules import NO_PYTHON, RUST_FRONTEND
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES

TRIED = State("on", activation.IF_TRIED)
CONFIG = SimpleNamespace(model_config=None)


def predicted(monkeypatch: pytest.MonkeyPatch, **states: State) -> None:
    monkeypatch.setattr(activation, "predict", lambda config: dict.fromkeys(COMPONENT_NAMES, ON) | states)


@pytest.mark.parametrize(("arguments", "is_cached"), [([], True), (["--no-enable-prefix-caching"], False)])
def test_arguments_are_completed_as_mmcache_serve_does(
    arguments: list[str], is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own default differs with the model."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    def args_of(given: Any) -> Any:
        return SimpleNamespace(create_engine_config=lambda usage_context: given)

    monkeypatch.setenv(plugins.VARIABLE, "none")
    monkeypatch.setattr(AsyncEngineArgs, "from_cli_args", args_of)
    given = preview.configuration("some/model", arguments)
    assert given.model == "some/model"
    assert given.enable_prefix_caching is is_cached


def test_the_rust_frontend_and_what_a_start_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A component that is on under a condition is no less without its part in the API server."""
    predicted(monkeypatch, metrics=TRIED, identity=State("unneeded", "no images"))
    monkeypatch.delenv(RUST_FRONTEND, raising=False)
    assert preview.components(None)["metrics"] == TRIED
    monkeypatch.setenv(RUST_FRONTEND, "1")
    found = preview.components(None)
    assert found["metrics"] == State("mixed", f"on in engine; off: {NO_PYTHON} (API server)")
    assert found["lazy_media"] == State("off", NO_PYTHON)
    assert found["identity"] == State("unneeded", "no images")
    assert found["block_keys"] == ON


def test_the_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a configuration that asks for another one than HfRenderer; what is off for another reason keeps it."""
    from vllm.renderers.deepseek_v32 import DeepseekV32Renderer
    from vllm.renderers.hf import HfRenderer

    monkeypatch.delenv(RUST_FRONTEND, raising=False)
    predicted(monkeypatch)
    monkeypatch.setattr(preview, "_renderer_of", lambda config: HfRenderer)
    assert set(preview.components(CONFIG).values()) == {ON}
    monkeypatch.setattr(preview, "_renderer_of", lambda config: DeepseekV32Renderer)
    found = preview.components(CONFIG)
    assert found.pop("image_extraction").reason == "not shown to be right with the renderer DeepseekV32Renderer"
    assert set(found.values()) == {ON}
    predicted(monkeypatch, image_extraction=State("off", "a reason"))
    assert preview.components(CONFIG)["image_extraction"] == State("off", "a reason")
    assert preview.components(None)["image_extraction"] == State("off", "a reason")


def test_a_model_that_a_server_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any) -> None:
        raise CausalImages("images would be wrong: serve another model")

    monkeypatch.setattr(hooks_api, "refuse_unservable", lambda config: None)
    assert preview.why_refused(CONFIG) == ""
    monkeypatch.setattr(hooks_api, "refuse_unservable", refuse)
    assert preview.why_refused(CONFIG) == "images would be wrong: serve another model"
