# SPDX-License-Identifier: Apache-2.0
"""The report of `mmcache doctor` for people: one screen, and tables where they were asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"on": "green", "off": "yellow", "mixed": "yellow", "unneeded": "dim"}
TOLD_BY = "a server's line `in force`, mmcache:component_info on /metrics, and /mmcache"


def show(facts: dict[str, Any], *, with_settings: bool) -> None:
    """Print the facts that `doctor.examine` has found."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    vllm = facts["vllm"]
    if vllm["version"]:
        versions = f"vLLM {vllm['version']} ({vllm['distribution'] or 'of no distribution'})"
    else:
        versions = f"vLLM can't be used ({vllm['distribution'] or 'no distribution'})"
    others = (f"{name} {facts['packages'][name] or 'not there'}" for name in ("torch", "transformers"))
    console.print(f"mmcache {facts['mmcache']}, {versions}, python {facts['python']}, {', '.join(others)}")
    if facts["engine"]:
        console.print(escape(facts["engine"]["words"] + (f" ({vllm['device']})" if vllm["device"] else "")))

    for finding in facts["findings"]:
        console.print(f"[bold red]finding[/] in {escape(finding['where'])}: {escape(finding['seen'])}")
        console.print("  cure:", finding["cure"], markup=False, soft_wrap=True)  # it may hold a command to copy
    for note in facts["notes"]:
        console.print("note:", note, markup=False)

    if facts["components"]:
        is_configured = facts["engine"]["runner"] is not None
        where = f"for {facts['model']}" if is_configured else "as far as is known without a model"
        if facts["model"] is None:
            where += " (`mmcache doctor MODEL` knows more)"
        console.print(f"\n[bold]What is predicted {escape(where)}.[/] What is in force, say {TOLD_BY}.")
        components = Table.grid(padding=(0, 2))
        for component, said in facts["components"].items():
            components.add_row(component, f"[{COLOURS[said['state']]}]{said['state']}[/]", escape(said["reason"]))
        console.print(components)
    else:
        where = f" for {facts['model']}" if facts["model"] else ""
        console.print(f"\n[bold]Nothing is predicted{escape(where)}[/], for the reasons above.")
    if facts["symbols"] is not None:
        console.print(_symbols(facts))
    if "ray_nodes" in facts:
        console.print(_ray_nodes(facts))
    if with_settings:
        console.print(_settings(facts))
        console.print(_layouts(facts))

    console.print()
    if num := len(facts["findings"]):
        console.print(f"[bold red]{num} finding{'s' * (num > 1)}[/], shown above with what to do")
    else:
        console.print("[green]no findings[/]")


def _symbols(facts: dict[str, Any]) -> "Table":
    made = _table("Replaced vLLM symbols", "group", "process", "target", "body", "why it does not fit")
    for row in facts["symbols"]:
        made.add_row(*(str(row[key]) for key in ("group", "process", "target", "body", "misfit")))
    return made


def _ray_nodes(facts: dict[str, Any]) -> "Table":
    made = _table("Nodes of the Ray cluster", "node", "mmcache", "vLLM", "settings")
    for row in facts["ray_nodes"]:
        settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
        made.add_row(row["node"], str(row["mmcache"]), str(row["vllm"]), settings)
    return made


def _settings(facts: dict[str, Any]) -> "Table":
    made = _table("Settings", "variable", "value", "default", "meaning")
    for row in facts["settings"]:
        made.add_row(row["variable"], str(row["value"]), str(row["default"]), row["meaning"])
    return made


def _layouts(facts: dict[str, Any]) -> "Table":
    made = _table("Block keys", "--prefix-caching-hash-algo", "layout", "why")
    for algorithm, layout in facts["block_keys"].items():
        made.add_row(algorithm, layout["layout"], layout["why"])
    return made


def _table(title: str, *columns: str) -> "Table":
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made
