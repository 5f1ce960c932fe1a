# SPDX-License-Identifier: Apache-2.0
"""`mmcache zoo ls` and `mmcache zoo build FAMILY DIR`: the tiny models to try mmcache with.

Listing is free; building loads torch and Transformers (a few seconds) and writes one directory.
"""

from pathlib import Path
from typing import Annotated

import typer

zoo_app = typer.Typer(help="Build tiny models of the real architectures.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add the verb."""
    app.add_typer(zoo_app, name="zoo", short_help="Build tiny models of the real architectures.")


@zoo_app.command("ls")
def ls() -> None:
    """List the families that can be built."""
    from mmcache_tools.zoo import FAMILIES, TRAINED

    for name in sorted(FAMILIES + TRAINED):
        print(name)


@zoo_app.command("build")
def build(
    family: Annotated[str, typer.Argument(help="A family that `mmcache zoo ls` lists.")],
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="The directory for the model. It is made if it is missing, and its files are overwritten.",
        ),
    ],
    seed: Annotated[int, typer.Option(help="The seed of the random weights. The model seeing has none.")] = 0,
) -> None:
    """Build one tiny model into DIR."""
    from mmcache_tools import zoo

    print(zoo.build(family, directory.expanduser(), seed))
