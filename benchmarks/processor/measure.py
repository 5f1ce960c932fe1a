# SPDX-License-Identifier: Apache-2.0
"""What an image costs before the model sees it: in rotation, after a restart, by size, many at once; videos; memory.

Stock and plugin, over HTTP. Each part takes at most 10 minutes and writes a file of its own into OUTPUT; what is there
of the same size is kept, unless --again is given, so that a run that was cut off goes on. The result has the targets,
and the parts as details, with those of the committed result that were not measured here. Alone on the machine, or the
numbers say nothing.
"""

import json
import time
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance
from benchmarks.processor.scenarios import PARTS, USED
from benchmarks.processor.targets import targets
from benchmarks.results import FOLDER, ROOT, Result, committed

OUTPUT = ROOT / ".artifacts" / "processor"
NAME = "processor"


def measure(options: Namespace) -> Result:
    """What is missing; a part that failed is a problem, and the others go on."""
    result = Result()
    for name in options.parts or PARTS:
        if not measured(name, OUTPUT / f"{name}.json", options):
            result.problems.append(f"failed: {name}")
    found = {path.stem: json.loads(path.read_text()) for path in OUTPUT.glob("*.json")}
    for target in targets(found):
        said = f"at most {target.limit}: {'met' if target.is_met else 'MISSED'}"
        result.add(target.what, "ratio", {"mmcache": target.value})
        print(said, flush=True)
    before = committed(NAME)["details"] if (FOLDER / f"{NAME}.json").exists() else {}
    result.details = {name: part for name in PARTS if (part := (before | found).get(name))}
    return result


def measured(name: str, path: Path, options: Namespace) -> bool:
    """Measure one part and write its result, where there is none of the same size; False if it failed."""
    sizes = {one: getattr(options, one) for one in USED[name.partition("-")[0]]}
    if not options.again and path.exists() and json.loads(path.read_text())["sizes"] == sizes:
        print(f"{name:24} was measured before", flush=True)
        return True
    start = time.monotonic()
    try:
        found: dict[str, Any] = PARTS[name](options)
    except Exception:  # whatever it is: the other parts go on
        print(f"{name:24} FAILED:\n{traceback.format_exc()}", flush=True)
        return False
    seconds = round(time.monotonic() - start)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")  # whole or not at all: a run may be cut off
    beside.write_text(json.dumps({**provenance(), "sizes": sizes, "seconds": seconds, "found": found}, indent=1) + "\n")
    beside.replace(path)
    print(f"{name:24} {seconds:5} s", flush=True)
    return True
