# SPDX-License-Identifier: Apache-2.0
"""How far a family's answers are from Transformers: the numbers of docs/exactness.md, in one line.

    python -m tests.engine.exactness.measure gemma4 [--window 32] [--batched-tokens 80] [--reference]

With MMCACHE_DISABLE=1 they are stock's. The scenarios are those of the matrix, judged and not asserted.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mmcache_tools.harness.engines import EngineConfig, ZooRig
from mmcache_tools.harness.oracle import step_deltas
from mmcache_tools.harness.scenarios import MAIN
from mmcache_tools.zoo import ZooOptions, build_cached

from vllm_mmcache.exactness.answers import Answer


def judge(rig: ZooRig, answers: list[Answer]) -> list[tuple[float, bool]]:
    """Each answer's largest delta of a log-probability, and whether a greedy token differs from Transformers'."""
    found = []
    for answer in answers:
        _, expected = rig.oracle.log_probabilities(answer.prompt, answer.images, answer.token_ids)
        wrong = tuple(expected.argmax(-1).tolist()) != answer.token_ids
        found.append((max(step_deltas(answer, expected)), wrong))
    return found


def main() -> None:
    """Print worst delta and wrong answers of one family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("--window", type=int, default=ZooOptions().sliding_window, help="sliding window in tokens")
    parser.add_argument("--batched-tokens", type=int, default=2048)
    parser.add_argument("--scenarios", help="names, separated by commas; without it all of the matrix")
    options = parser.parse_args()
    names = options.scenarios.split(",") if options.scenarios else [scenario.__name__ for scenario in MAIN]
    with tempfile.TemporaryDirectory() as root:
        model = build_cached(options.family, Path(root), options=ZooOptions(sliding_window=options.window))
        rig = ZooRig(EngineConfig(options.family, batched_tokens=options.batched_tokens), model)
        judged: list[tuple[float, bool]] = []
        for scenario in MAIN:
            if scenario.__name__ in names:
                rig.make_cold()
                judged += judge(rig, scenario(rig))
        rig.close()
    worst, wrong = max(delta for delta, _ in judged), sum(wrong for _, wrong in judged)
    print(f"{options.family}, window {options.window}: worst {worst:.1e}, wrong {wrong} of {len(judged)}")


if __name__ == "__main__":
    main()
