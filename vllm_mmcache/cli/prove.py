# SPDX-License-Identifier: Apache-2.0
"""`mmcache prove [MODEL] [-- VLLM ARGUMENTS]`: shows on this machine which components are exact, and switches those on.

Runs items in processes of their own, one after the other (vllm_mmcache/prove); imports no vLLM itself. What passed is
kept in the user's state directory (lifecycle/user_proofs.py), model by model, so that Ctrl-C loses only the one it is
at.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mmcache.base import distributions
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.cli import preflight, store

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from vllm_mmcache.prove.items import RESULT, Item
    from vllm_mmcache.prove.proving import Verdict

ON_THE_ZOO = "a check on the zoo's models"


def prove(
    model: Annotated[
        str | None,
        typer.Argument(
            help=(
                "Check the zoo's tiny model of the same family as MODEL. Without MODEL, the first five families of the "
                "zoo are checked."
            )
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM ARGUMENTS]...", help="The server's arguments for vLLM, after --."),
    ] = None,
    own: Annotated[
        bool,
        typer.Option(
            "--own", help="Check MODEL itself, and compare its answers with cold ones and with those of stock vLLM."
        ),
    ] = False,
    components: Annotated[
        list[str] | None,
        typer.Option("--components", "--rooms", help="Check only these components, with commas between them."),
    ] = None,
    families: Annotated[
        list[str] | None, typer.Option(help="Check only these families of the zoo, with commas between them.")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Run only a few scenarios in each check.")] = False,
    log: Annotated[
        Path | None, typer.Option(help="Write everything that the processes of the engines print to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and show the progress on stderr.")] = False,
    show: Annotated[bool, typer.Option("--show", help="List what is proven, and which proofs are ignored.")] = False,
    forget: Annotated[
        str | None, typer.Option(metavar="all|NUMBER", help="Remove the proof with this number, or all proofs.")
    ] = None,
    yes: store.Yes = False,
    dry_run: store.DryRun = False,
) -> None:
    """Check on this machine which components are exact. Those that pass are on from the next start.

    The exit status is 0 if all that could be checked passed, 1 if something failed, and 2 if nothing could be checked.
    """
    if show or forget is not None:
        if show and forget is not None:
            raise EnvironmentProblem("--show and --forget: give one of the two")
        raise typer.Exit(list_proofs(as_json) if show else remove(str(forget), as_json, yes, dry_run))
    if dry_run:
        raise EnvironmentProblem("--dry-run goes with --forget: nothing else is removed")
    if model is not None and model.startswith("-"):  # typer drops the --, and takes what follows for the model
        arguments = [model, *(arguments or [])]
        model = None
    chosen = check_choice(model, own, components, families)
    raise typer.Exit(run(model, arguments or [], own, *chosen, short, log, as_json))


def check_choice(
    model: str | None, own: bool, components: Sequence[str] | None, families: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The components and families asked for; no family where the model says which. Raises: EnvironmentProblem."""
    from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS

    if own and model is None:
        raise EnvironmentProblem("--own checks a model of yours, and none is named: mmcache prove MODEL --own")
    if families and model is not None:
        raise EnvironmentProblem(f"--families and the model {model} are both given: give one of the two")
    if not own:
        instead = f"; or check a model itself: mmcache prove {model or 'MODEL'} --own"
        zoo = distributions.load(distributions.ZOO, ON_THE_ZOO, instead)
    preflight.check_vllm()
    found = tuple(listed("--components", components, ENGINE_COMPONENTS)) or ENGINE_COMPONENTS
    if own:
        return found, ()
    return found, tuple(listed("--families", families, zoo.FAMILIES)) or (() if model else zoo.FIRST_FAMILIES)


def listed(option: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The names in an option, in the order of `known`. Raises: EnvironmentProblem for one that is not known."""
    names = {name.strip() for text in given or () for name in text.split(",") if name.strip()}
    if unknown := sorted(names - set(known)):
        raise EnvironmentProblem(f"{option} has {', '.join(unknown)}; choose of {', '.join(known)}")
    return [name for name in known if name in names]


def run(
    model: str | None,
    arguments: Sequence[str],
    own: bool,
    components: Sequence[str],
    families: Sequence[str],
    short: bool,
    log: Path | None,
    as_json: bool,
) -> int:
    """Run the items and say what they prove; returns the exit status. Raises: EnvironmentProblem, ProofsUnwritable."""
    from rich.console import Console

    from vllm_mmcache import __version__
    from vllm_mmcache.prove.items import OwnHow, RunOptions
    from vllm_mmcache.prove.look import look
    from vllm_mmcache.prove.proving import exit_code
    from vllm_mmcache.prove.proving import prove as prove_one
    from vllm_mmcache.prove.runs import Runs

    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False, emoji=False)
    shared: dict[str, Any] = {"short": short, "log": log, "arguments": tuple(arguments)}
    how: RunOptions
    if own:
        how = OwnHow(model=str(model), **shared)
    else:
        how = distributions.load(distributions.PROVE_ZOO, ON_THE_ZOO).ZooHow(**shared)
    seen = look(model or "", arguments, how.fixed_arguments)
    console.print(f"vLLM {seen.vllm} on {seen.platform} ({seen.device}), mmcache {__version__}")
    for line in seen.lines:
        console.print(line)
    subjects = subjects_of(model, own, families, seen.architecture)
    runs = Runs(how)
    compiled = not own and seen.platform != "cpu" and not seen.is_eager
    verdicts: list[Verdict] = []
    try:
        for subject, words in subjects:
            with progress(console) as tell:
                verdicts.append(prove_one(runs, subject, words, components, compiled=compiled, tell=tell))
    except KeyboardInterrupt:
        kept = ", ".join(verdict.subject for verdict in verdicts) or "nothing"
        console.print(f"stopped; kept is what was found for: {kept}")
        if verdicts:
            report(console, verdicts)
        return 130
    if as_json:
        print(json.dumps([verdict.as_json() for verdict in verdicts], indent=2))
    report(console, verdicts)
    return exit_code(verdicts)


def subjects_of(model: str | None, own: bool, families: Sequence[str], architecture: str) -> list[tuple[str, str]]:
    """What is checked, and each in words. Raises: EnvironmentProblem where the zoo has nothing like the model."""
    if own:
        return [(Path(str(model)).name, f"own model {model}")]
    if not families:
        families = distributions.load(distributions.PROVE_ZOO, ON_THE_ZOO).families_of(architecture)
        if not families:
            raise EnvironmentProblem(
                f"the zoo has no model of {architecture}, the architecture of {model}: check the model itself with "
                f"mmcache prove {model} --own"
            )
    return [(family, f"zoo family {family}") for family in families]


@contextmanager
def progress(console: "Console") -> Iterator[Any]:
    """A line for each item when it ends, and on a terminal what is running."""
    status: Status | None = None

    def tell(number: str, item: "Item", outcome: "RESULT | None", seconds: float) -> None:
        nonlocal status
        if status is not None:
            status.stop()
            status = None
        if outcome is None:
            if console.is_terminal:
                status = console.status(f"[{number}] {item.name}")
                status.start()
            return
        console.print(f"[{number}] {item.name}: {outcome['state']}: {outcome['reason']} ({seconds:.0f} s)")

    try:
        yield tell
    finally:
        if status is not None:
            status.stop()


def report(console: "Console", verdicts: "Sequence[Verdict]") -> None:
    """One table, then what it means."""
    from rich.table import Table

    from vllm_mmcache.lifecycle import user_proofs
    from vllm_mmcache.prove.proving import sentences

    table = Table("model", "component", "state", "why")
    for verdict in verdicts:
        for component, (state, why) in verdict.components.items():
            table.add_row(verdict.subject, component, state, why)
    console.print(table)
    for verdict in verdicts:
        for line in sentences(verdict):
            console.print(line)
    if any(verdict.of("proven") for verdict in verdicts):
        console.print(f"Kept in {user_proofs.path()}; `mmcache prove --show` lists it.")


def list_proofs(as_json: bool) -> int:
    """Print the proofs with their numbers, and what is ignored; returns the exit status."""
    from vllm_mmcache.lifecycle import user_proofs

    found, lines = user_proofs.read()
    if as_json:
        print(json.dumps({"proofs": [proof.as_json() for proof in found], "ignored": lines}, indent=2))
        return 0
    for number, proof in enumerate(found, 1):
        words = f"{proof.how}, {proof.when}"
        if proof.arguments:
            words += f"; vLLM arguments: {' '.join(proof.arguments)}"
        print(f"{number}. {', '.join(proof.components)}: {proof.place.words()}; {ascii(words)[1:-1]}")
        if here := versions_differ(proof.place):
            print(f"   not used here: {here}; run `mmcache prove` again")
    for line in lines:
        print(line)
    if not found and not lines:
        print("nothing is proven: run `mmcache prove`")
    return 0


def versions_differ(place: Any) -> str:
    """What of a proof's versions is not what is installed, in words; the rest is known once an engine starts."""
    from vllm_mmcache import __version__
    from vllm_mmcache.base.versions import vllm_version
    from vllm_mmcache.lifecycle.user_proofs import torch_version

    installed = {"vllm": vllm_version(), "mmcache": __version__, "torch": torch_version()}
    return ", ".join(
        f"it is for {name} {getattr(place, name)}, installed is {value}"
        for name, value in installed.items()
        if getattr(place, name) != value
    )


def remove(which: str, as_json: bool, yes: bool, dry_run: bool) -> int:
    """Forget the proof of a number, or all; returns the exit status. Asks on a terminal before.

    Raises: EnvironmentProblem, ProofsUnwritable, typer.Abort.
    """
    from vllm_mmcache.lifecycle import user_proofs

    found, ignored = user_proofs.read()
    count = len(found)
    known = f"a number from 1 to {count}" if count else "nothing else, since nothing is proven"
    if which == "all":
        there, what = count, f"{count} proofs" + (", and what is ignored of their file" if ignored else "")
    elif which.isdecimal() and 1 <= int(which) <= count:
        proof = found[int(which) - 1]
        there, what = 1, f"proof {which}, {', '.join(proof.components)} of {ascii(proof.place.architecture)[1:-1]}"
    else:
        raise EnvironmentProblem(f"--forget {which}: give `all`, or {known} (see `mmcache prove --show`)")
    if dry_run:
        print(json.dumps({"would_forget": there, "left": count - there}) if as_json else f"would forget {what}")
        return 0
    if (there or ignored) and store.asks(yes):
        store.confirm(what)
    try:
        forgotten = user_proofs.forget(None if which == "all" else int(which))
    except IndexError:  # another process was faster
        raise EnvironmentProblem(f"--forget {which}: it is gone by now (see `mmcache prove --show`)") from None
    if as_json:
        print(json.dumps({"forgotten": forgotten, "left": count - forgotten}))
    elif which == "all":
        print(f"{forgotten} proofs are forgotten")
    else:
        print(f"proof {which} is forgotten; {count - forgotten} are left")
    return 0
