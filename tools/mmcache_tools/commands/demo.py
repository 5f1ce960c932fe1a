# SPDX-License-Identifier: Apache-2.0
"""`mmcache demo`: one conversation about pictures, on stock vLLM and with the plugin, compared with cold runs.

Runs the client; the servers are processes of their own, one after the other. What it does is in mmcache_tools/demo.
"""

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(short_help="Compare stock vLLM and the plugin in one conversation.")(demo)


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the tiny model and the server logs are kept.")] = Path(
        ".artifacts"
    ),
    family: Annotated[
        str, typer.Option(help="A family that `mmcache zoo ls` lists. All but seeing get photographs.")
    ] = "seeing",
    turns: Annotated[int, typer.Option(min=1, max=12, help="How many turns the conversation has.")] = 12,
) -> None:
    """Hold one conversation with stock vLLM and with the plugin, and check every answer against a cold run."""
    from mmcache_tools.demo.run import run

    raise typer.Exit(run(directory.expanduser(), family, turns))
