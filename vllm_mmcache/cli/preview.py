# SPDX-License-Identifier: Apache-2.0
"""What a start with MODEL and vLLM's arguments would give, for `mmcache doctor`.

In a process of its own, which imports vLLM and lets it make the VllmConfig that `mmcache serve` would make: no engine,
no weights, and nothing replaced.
"""

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm_mmcache.base.errors import CausalImages, EnvironmentProblem, UnschedulableImage
from vllm_mmcache.base.status import State, combine
from vllm_mmcache.cli import plugins, serve
from vllm_mmcache.lifecycle.config_rules import NO_PYTHON, has_rust_frontend


def configuration(model: str, arguments: Sequence[str]) -> Any:
    """The VllmConfig that vLLM itself makes for `mmcache serve MODEL ARGUMENTS`.

    Raises: EnvironmentProblem for arguments that vLLM does not take; whatever vLLM raises for a model or a value.
    """
    # vLLM loads general plugins to make one. We are to look, not to take part; the others may bring the model.
    os.environ[plugins.VARIABLE] = ",".join(name for name in plugins.loaded() if name != plugins.NAME)

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser  # where it comes from is another place in 0.33
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parser.error = refuse
    given = parser.parse_args([model, *serve.with_defaults(arguments)])
    given.model = given.model_tag or given.model
    return AsyncEngineArgs.from_cli_args(given).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def refuse(message: str) -> NoReturn:
    """What a parser of vLLM's arguments does with a mistake, in place of ending the process.

    Raises: EnvironmentProblem.
    """
    raise EnvironmentProblem(f"vLLM says of these arguments: {message}")


def sentence(error: Exception) -> str:
    """What an error of vLLM says, without what stands around it."""
    text = str(error)
    if callable(listed := getattr(error, "errors", None)):  # of pydantic
        first = listed()[0]
        text = ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def components(vllm_config: Any) -> dict[str, State]:
    """What each component will be; of a whole deployment that is started from here. None: without a configuration."""
    from vllm_mmcache.lifecycle import activation
    from vllm_mmcache.lifecycle.registry import parts
    from vllm_mmcache.lifecycle.report import with_renderer

    found = activation.predict(vllm_config)
    on = {component: state for component, state in found.items() if state.state == "on"}
    if has_rust_frontend():
        behind = {**parts("engine"), **parts("worker")}
        for component in parts("api"):
            if component in on:
                engine = [("engine", on[component])] if component in behind else []
                found[component] = combine([("API server", State("off", NO_PYTHON)), *engine])
    elif vllm_config is not None:
        off = with_renderer(_renderer_of(vllm_config))
        found |= {component: state for component, state in off.items() if component in on}
    return found


def why_refused(vllm_config: Any) -> str:
    """Why a server in which image_spans is on would not start with this model; empty where it would."""
    from vllm_mmcache.components.image_spans.hooks_api import refuse_unservable

    try:
        refuse_unservable(vllm_config)
    except (CausalImages, UnschedulableImage) as error:
        return str(error)
    return ""


def _renderer_of(vllm_config: Any) -> type:
    """The class of the renderer that vLLM takes from its registry."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import tokenizer_args_from_config

    mode, *_ = tokenizer_args_from_config(vllm_config.model_config)
    renderer: type = RENDERER_REGISTRY.load_renderer_cls(mode)
    return renderer
