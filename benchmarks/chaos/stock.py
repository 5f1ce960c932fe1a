# SPDX-License-Identifier: Apache-2.0
"""What a stock server takes under the same load, for as long: the measure for the growth that a chaos run may show.

python -m benchmarks.chaos.stock [--seconds 4] [--clients 8] [--save]

Its answers are compared, too, with those of a server that caches nothing: the comparison has to find them equal.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos import watch
from benchmarks.chaos.clients import Clients, cold_answers, make_pictures
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.measure import FAMILY, FIRST_ANSWER_S
from benchmarks.chaos.scene import ARGS
from benchmarks.machine import provenance
from benchmarks.servers import zoo_server
from vllm_mmcache.zoo import build_cached

RESULT = Path(__file__).parent / "results" / "stock.json"
PHASES = len(FAULTS) + 2  # of a chaos run's one server that is not killed


def main() -> None:
    """Measure, print, and write results/stock.json with --save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.stock", description=__doc__)
    parser.add_argument("--seconds", type=float, default=6, help="between two looks; a chaos run's under each fault")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="write the committed result")
    options = parser.parse_args()
    pictures = make_pictures(options.pictures)
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(FAMILY, Path(folder))
        with zoo_server(model, "stock", images=1, args=(*ARGS, "--no-enable-prefix-caching")) as server:
            answers, _ = cold_answers(server.url, pictures)
        with (
            zoo_server(model, "stock", images=1, args=(*ARGS, "--enable-prefix-caching")) as server,
            watch.Peaks() as peaks,
            Clients(answers, pictures, options.clients) as clients,
        ):
            peaks.look_at(server)
            clients.serve(server.url)
            clients.wait_for_an_answer(FIRST_ANSWER_S)
            phases: list[dict[str, Any]] = []
            for _ in range(1 + PHASES):
                time.sleep(options.seconds)
                phases.append({**clients.take().as_dict(), **peaks.take()})
            peaks.look_at(None)
            clients.down()
    first, last = phases[1], phases[-1]  # the first one is that in which a chaos run fills its stores
    growth = {name: last[name] - first[name] for name in first if name.endswith(("_mib", "_files"))}
    sums = {name: sum(one[name] for one in phases) for name in ("requests", "wrong", "failed")}
    result = {**provenance(), **sums, "growth": growth, "phases": phases}
    print(result)
    if options.save:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
