# SPDX-License-Identifier: Apache-2.0
"""One engine on runner V2 with a family of the zoo: `python -m tests.runner_v2.worker FAMILY ZOO`; prints JSON.

Asked about two images, with the features kept and all else forgotten in between.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.exactness.engines import EngineConfig, EnginePool
from tests.exactness.expect import Inexact, assert_exact
from tests.exactness.scenarios import filler, one, picture, user
from tests.features.towers import Runs, features_by_image


def main() -> None:
    family, zoo = sys.argv[1], Path(sys.argv[2])
    pool = EnginePool(zoo)
    rig, runs = pool.get(EngineConfig(family)), Runs()
    found: dict[str, object] = {"runner": f"{type(rig.runner).__module__}.{type(rig.runner).__name__}", "runs": []}
    answers = []
    for parts in (
        (filler(60), picture(500), "and", picture(501), "Compare."),
        (picture(501), "What is it?"),
        (filler(40), picture(500), picture(502), "And now?"),
        (filler(40), picture(500), picture(502), "And now?"),
    ):
        answers.append(one(rig, user(*parts), max_tokens=4))
        found["runs"] = [*found["runs"], runs.new()]  # type: ignore[misc]
        if len(answers) < 3:
            rig.forget_all_but_features()
    found["cached"] = answers[-1].num_cached_tokens
    found["worst"] = assert_exact(rig, answers)
    with torch.inference_mode():
        for features in features_by_image(rig).values():
            features.mul_(-1)
    rig.forget_all_but_features()
    try:
        assert_exact(rig, [one(rig, user(picture(501), "What is it?"), max_tokens=4)])
        found["spoiled features are noticed"] = False
    except Inexact:
        found["spoiled features are noticed"] = True
    pool.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
