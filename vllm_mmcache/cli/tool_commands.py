# SPDX-License-Identifier: Apache-2.0
"""The verbs that come with vllm-mmcache-tools. Where that is not installed, each is listed, and says how it is."""

from importlib import import_module

import typer

from vllm_mmcache.base import distributions

VERBS = {
    "demo": "Compare stock vLLM and the plugin in one conversation.",
    "lint": "Find out where a chat template breaks the prefix cache.",
    "zoo": "Build tiny models of the real architectures.",
}
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def add_to(app: typer.Typer) -> None:
    """Add the verbs, or what stands for those that are not installed."""
    for verb, what in VERBS.items():
        module = f"mmcache_tools.commands.{verb}"
        if distributions.are_here(module):
            import_module(module).add_to(app)
        else:
            app.command(
                verb,
                help=f"Needs {distributions.TOOLS}: {what}",
                short_help=f"Needs {distributions.TOOLS}: {what}",
                context_settings=ANYTHING,
            )(missing)


def missing(context: typer.Context) -> None:
    """Whatever follows the verb. Raises: EnvironmentProblem."""
    raise distributions.missing(context.command_path)
