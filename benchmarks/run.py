# SPDX-License-Identifier: Apache-2.0
"""Run one benchmark on stock and plugin, and print what it finds.

python -m benchmarks.run NAME [--short] [--save] [--output DIRECTORY] [its options]

--save writes the committed result, benchmarks/results/NAME.json; `make bench-table` shows it. Exit code 1 where the
benchmark found what must not be.
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

from benchmarks import results, scenarios, server_scenarios
from benchmarks.catalogue import BENCHMARKS, Benchmark
from benchmarks.results import Result


def measure_of(name: str) -> Callable[[Namespace], Result]:
    """What measures a benchmark, given its options."""
    if name in server_scenarios.SCENARIOS:
        return partial(scenarios.measure, server_scenarios.SCENARIOS[name])
    if (spec := importlib.util.find_spec(f"benchmarks.{name}")) is not None:
        module = f"{spec.name}.measure" if spec.submodule_search_locations else spec.name
        found: Callable[[Namespace], Result] = importlib.import_module(module).measure
        return found
    from benchmarks import replays  # vLLM comes with it

    return lambda options: replays.measure(name, options)


def parser_of(name: str, benchmark: Benchmark) -> argparse.ArgumentParser:
    """The options of one; an option that is not given takes the value of the form, whole or short."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.run {name}", description=benchmark.what)
    for option, value in benchmark.options.items():
        several = isinstance(value, tuple)
        kind = type(value) if not several else type(value[0]) if value else str
        short = benchmark.short.get(option, value)
        said = f"default {value}" + (f", short {short}" if short != value else "")
        more: dict[str, Any] = {"nargs": "+", "type": kind} if several else {"type": kind}
        if kind is bool:
            more = {"action": "store_true", "default": None}
        if option in ("sides", "tiers"):
            more["choices"] = value
        parser.add_argument(f"--{option.replace('_', '-')}", help=said, **more)
    parser.add_argument("--short", action="store_true", help="shows that it works, and little more")
    parser.add_argument("--save", action="store_true", help="write the committed result")
    parser.add_argument("--output", type=Path, metavar="DIRECTORY", help="write the result into this directory")
    return parser


def options_of(name: str, arguments: list[str]) -> tuple[Namespace, list[Path]]:
    """The benchmark's options, and where its result goes."""
    benchmark = BENCHMARKS[name]
    parser = parser_of(name, benchmark)
    given = vars(parser.parse_args(arguments))
    output, is_saved, is_short = given.pop("output"), given.pop("save"), given.pop("short")
    folders = ([results.FOLDER] if is_saved else []) + ([output] if output else [])
    form = benchmark.short if is_short else {}
    said = {option: value for option, value in given.items() if value is not None}
    return Namespace(**{**benchmark.options, **form, **said}), [folder / f"{name}.json" for folder in folders]


def main() -> None:
    """Measure, print, and write where the options say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    name = parser.parse_args(sys.argv[1:2]).name
    options, paths = options_of(name, sys.argv[2:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended ends its servers
    result = measure_of(name)(options)
    for path in paths:
        results.save(path, result, vars(options))
    sys.exit("\n".join(result.problems) or 0)


if __name__ == "__main__":
    main()
