# SPDX-License-Identifier: Apache-2.0
"""Run one benchmark on stock and plugin, and print what it finds.

python -m benchmarks.run NAME [--short] [--save] [--output DIRECTORY] [its options]
python -m benchmarks.run --list

--save writes the result that is to be committed, benchmarks/results/NAME.json; `make bench-table` shows it. Such a
result names the commit that it can be repeated from: where files other than results differ from the commit, or where
there is none, nothing is measured. --output writes it anywhere else, whatever the state of the files.

Exit code 1 where the benchmark found what must not be, 2 where it was not run.
"""

import argparse
import importlib.util
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results, scenarios
from benchmarks.catalogue import ABOUT, BENCHMARKS, listing
from benchmarks.rows import add_targets
from benchmarks.server_scenarios import SCENARIOS


def measure_of(name: str) -> Callable[[Namespace], results.Result]:
    """What measures a benchmark, given its options."""
    if name in SCENARIOS:
        return partial(scenarios.measure, SCENARIOS[name])
    spec = importlib.util.find_spec(ABOUT["modules"].get(name, f"benchmarks.{name}"))
    if spec is None:
        return partial(importlib.import_module("benchmarks.replays").measure, name)
    module = f"{spec.name}.measure" if spec.submodule_search_locations else spec.name
    found: Callable[[Namespace], results.Result] = importlib.import_module(module).measure
    return found


def options_of(name: str, arguments: list[str]) -> tuple[Namespace, list[Path]]:
    """The options of one, and where its result goes. What is not given takes the value of the form, whole or short."""
    benchmark = BENCHMARKS[name]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.run {name}", description=benchmark.what)
    for option, value in benchmark.options.items():
        several = isinstance(value, list)
        more: dict[str, Any] = {"type": type(value[0]) if several and value else str if several else type(value)}
        if several:
            more["nargs"] = "+"
        if option in ("sides", "tiers"):
            more["choices"] = value
        if isinstance(value, bool):
            more = {"action": "store_true", "default": None}
        shown = f"default {value}" + (f", short {benchmark.short[option]}" if option in benchmark.short else "")
        parser.add_argument(f"--{option.replace('_', '-')}", help=shown, **more)
    parser.add_argument("--short", action="store_true", help="shows that it works, and little more")
    parser.add_argument("--save", action="store_true", help="write the result to be committed; needs a clean tree")
    parser.add_argument("--output", type=Path, metavar="DIRECTORY", help="write the result into this directory")
    given = vars(parser.parse_args(arguments))
    output, is_saved, is_short = given.pop("output"), given.pop("save"), given.pop("short")
    folders = [*([results.FOLDER] if is_saved else []), *([output] if output else [])]
    said = {option: value for option, value in given.items() if value is not None}
    options = {**benchmark.options, **(benchmark.short if is_short else {}), **said}
    return Namespace(**options), [folder / f"{name}.json" for folder in folders]


def main() -> None:
    """Measure, print, and write where the options say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    if sys.argv[1:] == ["--list"]:
        print(listing())
        return
    parser.add_argument("--list", action="store_true", help="show what each one asks, and the target of make")
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    name = parser.parse_args(sys.argv[1:2]).name
    options, paths = options_of(name, sys.argv[2:])
    is_to_commit = any(path.parent.resolve() == results.FOLDER for path in paths)
    if is_to_commit and (reason := results.why_not_to_commit()):
        parser.exit(2, f"error: {reason}.\nCommit first, or use --output DIRECTORY instead of --save.\n")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended ends its servers
    result = measure_of(name)(options)
    add_targets(name, result)
    for path in paths:
        results.save(path, result, vars(options))
    sys.exit("\n".join(result.problems) or 0)


if __name__ == "__main__":
    main()
