# SPDX-License-Identifier: Apache-2.0
"""`mmcache lint TEMPLATE CONVERSATIONS`: where a chat template breaks the prefix cache between two turns, and why.

Runs in a process of its own, without vLLM and without a server. Exit status 0 when every turn begins with the one
before, 1 with findings.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mmcache.base.errors import LintError

if TYPE_CHECKING:
    from mmcache_tools.lint.check import Report

FORMS = ("vllm", "as-sent", "switch")


def add_to(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(short_help="Find out where a chat template breaks the prefix cache.")(lint)


def lint(
    template: Annotated[Path, typer.Argument(help="A chat template's file, or a model directory.")],
    conversations: Annotated[
        Path,
        typer.Argument(
            help='A file of JSON lines, each with OpenAI messages or {"messages": ..., "tools": ...}. Use - for stdin.'
        ),
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Count tokens with this tokenizer.json. [default: the model directory's]")
    ] = None,
    content: Annotated[
        str,
        typer.Option(
            help="How texts reach the template: vllm (one form always), as-sent, or switch (strings until the first "
            "image, lists from then on)."
        ),
    ] = "vllm",
    kwargs: Annotated[str, typer.Option(metavar="JSON", help="The chat_template_kwargs of every request.")] = "{}",
    requests: Annotated[
        bool, typer.Option("--requests", help="The lines are the requests of one conversation, in their order.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Render conversations turn by turn, and report where a turn does not begin with the one before it."""
    if content not in FORMS:
        raise LintError(f"--content {content}: expected one of {', '.join(FORMS)}")
    given = object_of(kwargs)
    from mmcache_tools.lint import check
    from mmcache_tools.lint import conversations as lines
    from mmcache_tools.lint import template as templates

    read = lines.read(conversations.expanduser())
    loaded = templates.load(
        template.expanduser(), tokenizer and tokenizer.expanduser(), given, templates.Content(content)
    )
    report = check.check(loaded, read, requests)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report)
    raise typer.Exit(1 if report.findings else 0)


def object_of(text: str) -> dict[str, Any]:
    """The object that --kwargs holds as JSON. Raises: LintError for anything else."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise LintError(f'--kwargs {text}: expected a JSON object, such as {{"enable_thinking": false}}')
    return given


def show(report: "Report") -> None:
    """Print the report for people. Control characters of prompts are shown escaped."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    pairs = f"{report.requests} requests, {report.pairs} of them with an earlier turn"
    if not report.findings:
        console.print(f"[green]no findings[/]: {pairs}, and each begins with the one before it")
        return
    table = Table("line", "turn", "cause", "message", f"{report.unit} lost", "images lost", "where the prompts part")
    for finding in report.findings:
        there = "" if finding.next_line == finding.line else f" -> {finding.next_line}"
        table.add_row(
            f"{finding.line}{there}",
            str(finding.turn) if finding.next_turn == finding.turn else f"{finding.turn} -> {finding.next_turn}",
            finding.cause,
            "" if finding.message is None else str(finding.message),
            str(finding.lost),
            str(finding.images_lost),
            escape(f"{quoted(finding.before)}\nwas {quoted(finding.was)}\nnow {quoted(finding.now)}"),
        )
    console.print(table)
    for cause, why, fix in dict.fromkeys((finding.cause, finding.why, finding.fix) for finding in report.findings):
        console.print(f"[bold]{cause}[/]: {escape(quoted(why, ''))}")
        console.print(f"  fix: {escape(fix or 'none but another template')}")
    console.print(
        f"{len(report.findings)} findings; {pairs}. Computed again though nothing is new: {report.lost} "
        f"{report.unit} of earlier prompts, of {report.prompt} in later ones"
    )


def quoted(text: str, mark: str = '"') -> str:
    """`text` on one line, without a character that a terminal could obey."""
    return mark + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + mark
