# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs at start: CPU seconds of API server, engine and worker until the server is healthy.

python -m benchmarks.start_cost.run [--pairs 5] [--name after] [--plugin CHECKOUT] [--save]

Stock and plugin start in turn, a real server with the engine and one worker in processes of their own. A whole process
takes 10 s with a spread of a second, so the plugin's own part is measured directly, too (probe/sitecustomize.py): its
functions and rooms that run at start, its modules, and the modules that a stock process has not imported by then.

--plugin measures another checkout. The result keeps what was measured under other names.
Target: at most 0.5 s of the plugin's own in each process.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import commit, provenance, result_options, save_result
from benchmarks.sides import SIDES
from benchmarks.start_cost.starts import PROCESSES, Process, compile_all, own_costs, rest_cpu_s, start
from benchmarks.summary import ROOT
from vllm_mmcache.zoo import build_cached

NAMES = ("before", "after")
COMMITTED = Path(__file__).parent / "results" / "start_cost.json"
NUM_MOST = 15  # modules that are named in a result


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_cost.run", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="starts of each side")
    parser.add_argument("--name", default="after", choices=NAMES, help="what the result calls this measurement")
    parser.add_argument("--plugin", metavar="CHECKOUT", help="whose plugin is measured; this one's if not given")
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    plugin = Path(options.plugin or ROOT).resolve()
    earlier = json.loads(COMMITTED.read_text())["measured"] if COMMITTED.exists() else {}
    found = {"commit": commit(plugin), "machine": provenance()["machine"], "pairs": options.pairs}
    found["processes"] = measure(plugin, options.pairs)
    measured = {**earlier, options.name: found}
    save_result(__file__, options, {"measured": {name: measured[name] for name in NAMES if name in measured}})


def measure(plugin: Path, num_pairs: int) -> dict[str, Any]:
    """The summary of each process; prints a line for each."""
    compile_all(plugin)
    pairs: list[dict[str, dict[str, Process]]] = []
    with tempfile.TemporaryDirectory() as root:
        model = build_cached("qwen3-vl", Path(root))
        for number in range(num_pairs):
            pairs.append({side: start(side, plugin, model) for side in SIDES[:: -1 if number % 2 else 1]})
            print(f"pair {number + 1} of {num_pairs}", flush=True)
    result = {}
    for process in PROCESSES:
        result[process] = found = summary([{side: pair[side][process] for side in SIDES} for pair in pairs])
        print(
            f"{process}: stock {found['cpu_s_stock']:.2f} s, plugin {found['cpu_s_plugin']:.2f} s; "
            f"the plugin's own {found['plugin_own_cpu_s']:.3f} s",
            flush=True,
        )
    return result


def summary(pairs: list[dict[str, Process]]) -> dict[str, Any]:
    """Medians and ranges of one process over the pairs."""
    stock, ours = ([pair[side]["whole_cpu_s"] for pair in pairs] for side in SIDES)
    rests = [rest_cpu_s(pair["mmcache"]) - rest_cpu_s(pair["stock"]) for pair in pairs]
    costs = [own_costs(pair["stock"], pair["mmcache"]) for pair in pairs]
    own = [cost["plugin_own_cpu_s"] for cost in costs]
    return {
        "cpu_s_stock": round(median(stock), 3),
        "cpu_s_plugin": round(median(ours), 3),
        **spread("difference", [mine - theirs for theirs, mine in zip(stock, ours, strict=True)]),
        **spread("difference_beside_imports", rests),
        **spread("plugin_own_cpu", own),
        **{part: round(median(cost[part] for cost in costs), 4)
           for part in ("functions_cpu_s", "rooms_cpu_s", "own_modules_cpu_s", "extra_modules_cpu_s")},
        **{part: median(cost[part] for cost in costs) for part in ("own_modules", "extra_modules")},
        **{part: most([cost[part] for cost in costs])
           for part in ("rooms_cost", "own_cost", "extra_cost", "extra_by_importer")},
        "all": {"cpu_s_stock": stock, "cpu_s_plugin": ours, "plugin_own_cpu_s": [round(seconds, 4) for seconds in own]},
    }  # fmt: skip


def spread(what: str, seconds: list[float]) -> dict[str, Any]:
    """Median and range."""
    return {f"{what}_s": round(median(seconds), 4), f"{what}_range_s": [round(min(seconds), 4), round(max(seconds), 4)]}


def most(costs: list[dict[str, float]]) -> dict[str, float]:
    """Median CPU seconds of those that take most."""
    medians = {name: median(cost.get(name, 0.0) for cost in costs) for name in set().union(*costs)}
    return {name: round(medians[name], 4) for name in sorted(medians, key=lambda name: -medians[name])[:NUM_MOST]}


if __name__ == "__main__":
    main()
