# SPDX-License-Identifier: Apache-2.0
"""What an image costs before the model sees it: in rotation, after a restart, by size, many at once; videos; memory.

python -m benchmarks.processor.measure [--parts NAME ...] [--short] [--save]

Stock and plugin, over HTTP. Each part takes at most 10 minutes and writes a file of its own into OUTPUT/parts; what is
there of the same size is kept, unless --again is given, so that a run that was cut off goes on. In the end the
parts are put together, and the targets are printed. Alone on the machine, or the numbers say nothing.
"""

import argparse
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance
from benchmarks.processor.scenarios import PARTS, USED
from benchmarks.processor.targets import Target, targets
from benchmarks.summary import ROOT

OUTPUT = ROOT / ".artifacts" / "processor"
COMMITTED = Path(__file__).parent / "results" / "processor.json"
# The size of each part: the whole, and one that shows that it works.
SIZES: dict[str, tuple[float, float, str]] = {
    "images": (400, 14, "pictures in rotation"),
    "rounds": (2, 2, "of the rotation; the first makes them known"),
    "cache_gib": (0.25, 0.03, "of the processor cache that they fall out of: 49 of them, 5"),
    "restarted": (40, 6, "pictures asked about after a restart"),
    "samples": (3, 1, "pictures of each size, for the table of costs"),
    "at_once": (32, 4, "unknown pictures at once"),
    "rounds_at_once": (4, 2, "of them, on each side"),
    "alone": (8, 2, "unknown pictures alone, after each of these rounds"),
    "videos": (4, 1, "asked about five times each"),
    "known": (10_000, 400, "pictures that become known while memory is watched"),
}


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processor.measure", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--short", action="store_true", help="a few pictures: shows that it works, and no more")
    for name, (_, _, what) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(SIZES[name][0]), metavar="N", help=what)
    parser.add_argument("--again", action="store_true", help="measure also what has a result")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIRECTORY")
    parser.add_argument("--save", action="store_true", help="write the committed result: results/ beside this file")
    return parser


def main() -> None:
    """Measure what is missing, print the targets, and write the whole; exit code 1 where a part failed."""
    options = arguments().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended ends its servers
    for name, (whole, short, _) in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, short if options.short else whole)
    options.output = options.output.resolve()
    parts = options.output / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.parts if not measured(name, parts / f"{name}.json", options)]
    found = {path.stem: json.loads(path.read_text()) for path in parts.glob("*.json")}
    write(options.output / COMMITTED.name, in_order(found))
    if options.save:
        committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
        write(COMMITTED, in_order(committed | found))  # a part that was not measured here stays as it was
    for target in targets(found):
        print(line(target), flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all: a run may be cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)


def in_order(found: dict[str, Any]) -> dict[str, Any]:
    """The parts that there are, in the order of PARTS."""
    return {name: found[name] for name in PARTS if name in found}


def measured(name: str, path: Path, options: argparse.Namespace) -> bool:
    """Measure one part and write its result, where there is none of the same size; False if it failed."""
    sizes = {one: getattr(options, one) for one in USED[name.partition("-")[0]]}
    if not options.again and path.exists() and json.loads(path.read_text())["sizes"] == sizes:
        print(f"{name:24} was measured before", flush=True)
        return True
    start = time.monotonic()
    try:
        result: dict[str, Any] = PARTS[name](options)
    except Exception:  # whatever it is: the other parts go on
        print(f"{name:24} FAILED:\n{traceback.format_exc()}", flush=True)
        return False
    seconds = round(time.monotonic() - start)
    write(path, {**provenance(), "sizes": sizes, "seconds": seconds, "found": result})
    print(f"{name:24} {seconds:5} s", flush=True)
    return True


def line(target: Target) -> str:
    """A target in a line, with whether it is met."""
    return f"{target.what:100} {target.shown}; at most {target.limit}: {'met' if target.is_met else 'MISSED'}"


if __name__ == "__main__":
    main()
