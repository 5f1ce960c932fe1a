# SPDX-License-Identifier: Apache-2.0
"""What a stock server takes under the load of the chaos run, for as long: the measure for the growth it may show.

Its answers are compared, too, with those of a server that caches nothing: the comparison has to find them equal.
"""

import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.chaos import watch
from benchmarks.chaos.clients import Clients, cold_answers, make_pictures
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.measure import FAMILY, FIRST_ANSWER_S
from benchmarks.chaos.scene import ARGS
from benchmarks.results import Result
from benchmarks.servers import zoo_server
from vllm_mmcache.zoo import build_cached

PHASES = len(FAULTS) + 2  # of a chaos run's one server that is not killed


def measure(options: Namespace) -> Result:
    """One phase after the other, and what the processes have grown by."""
    result, phases = Result(), list[dict[str, Any]]()
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
            for _ in range(1 + (options.phases or PHASES)):
                time.sleep(options.seconds)
                phases.append({**clients.take().as_dict(), **peaks.take()})
            peaks.look_at(None)
            clients.down()
    result.details["phases"] = phases
    first, last = phases[1], phases[-1]  # the first one is that in which a chaos run fills its stores
    for what in ("requests", "wrong", "failed"):
        result.add("chaos", what, {"stock": sum(one[what] for one in phases)})
    for what in (name for name in first if name.endswith(("_mib", "_files"))):
        result.add("growth", what, {"stock": last[what] - first[what]})
    return result
