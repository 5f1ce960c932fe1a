# SPDX-License-Identifier: Apache-2.0
"""vLLM's own client: what it is asked, and on real servers that the second run of a seed is the first one again."""

import json
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import random_mm
from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import ROOT
from tests.sizes import larger

OPTIONS = Namespace(**{**BENCHMARKS["random_mm"].options, "requests": 3})


def test_a_request_that_failed_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def client(command: list[str], **_: Any) -> Any:
        said = dict(pairwise(command))
        path = Path(said["--result-dir"]) / said["--result-filename"]
        path.write_text(json.dumps({"completed": completed, "seed": said["--seed"]}))
        return subprocess.CompletedProcess(command, code, "", "what it said")

    monkeypatch.setattr(random_mm.subprocess, "run", client)
    completed, code = 3, 0
    assert random_mm.bench("http://nowhere", Path("model"), OPTIONS)["seed"] == str(random_mm.SEED)
    completed = 2
    with pytest.raises(RuntimeError, match="2 of 3 requests: what it said"):
        random_mm.bench("http://nowhere", Path("model"), OPTIONS)
    completed, code = 3, 1
    with pytest.raises(RuntimeError, match="what it said"):
        random_mm.bench("http://nowhere", Path("model"), OPTIONS)


@larger
@pytest.mark.engine
def test_the_same_seed_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "random_mm", "--short", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "random_mm.json").read_text())
    first, again = content["found"]["first run"], content["found"]["same seed again"]
    images = content["options"]["requests"] * content["options"]["images"]
    assert first["decodes"] == first["tower_runs"] == {"stock": images, "mmcache": images}
    assert first["prompt_tokens"] == again["prompt_tokens"]
    assert again["decodes"] == {"stock": images, "mmcache": 0}, "stock decodes what it has seen"
    assert again["tower_runs"]["mmcache"] == 0
    assert 0 < again["cached_tokens"]["mmcache"] <= again["best_tokens"]["mmcache"]
