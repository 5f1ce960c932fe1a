# SPDX-License-Identifier: Apache-2.0
"""The user's vLLM arguments: read by vLLM's own parser, and what of them an item can take. An item's process."""

import argparse
from collections.abc import Sequence
from typing import Any

from vllm_mmcache.base.errors import EnvironmentProblem

# What the checks themselves must have as it is.
_THE_CHECKS = (
    "served_model_name", "seed", "max_logprobs", "logprobs_mode", "disable_log_stats", "enable_prefix_caching",
    "data_parallel_size", "data_parallel_backend", "disable_log_requests",
)  # fmt: skip


def given(arguments: Sequence[str]) -> dict[str, Any]:
    """What the arguments say, and no default, by the names of vLLM's EngineArgs. Raises: EnvironmentProblem."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="mmcache prove MODEL --", add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS

    def refuse(message: str) -> None:
        raise EnvironmentProblem(
            f"vLLM does not take these arguments: {message}: give those of its engine, not a server's such as --port"
        )

    parser.error = refuse
    try:
        found: dict[str, Any] = vars(parser.parse_args(list(arguments)))
    except (TypeError, ValueError) as error:
        refuse(str(error))
    if "model" in found:
        raise EnvironmentProblem("--model is among vLLM's arguments: name the model first, mmcache prove MODEL -- ...")
    return found


def taken(found: dict[str, Any], fixed: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """What an item's engine gets of them, and a line about what it does not get.

    `fixed`: names of those that a model of the zoo has its own of.
    """
    left_out = [name for name in found if name in _THE_CHECKS or name in fixed]
    kept = {name: value for name, value in found.items() if name not in left_out}
    lines = []
    if left_out:
        options = ", ".join("--" + name.replace("_", "-") for name in left_out)
        whose = "the zoo's model and the checks have their own" if fixed else "the checks have their own"
        lines.append(f"left out of vLLM's arguments: {options}; {whose}")
    additional = kept.get("additional_config")
    if isinstance(additional, dict) and "mmcache" in additional:
        kept["additional_config"] = {name: value for name, value in additional.items() if name != "mmcache"}
        lines.append("left out of --additional-config: mmcache, since each item switches components itself")
    return kept, lines
