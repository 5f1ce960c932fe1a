# SPDX-License-Identifier: Apache-2.0
"""vLLM's own client: what it is asked, and on real servers that the second run of a seed is the first one again."""

import json
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import server_scenarios
from benchmarks.catalogue import BENCHMARKS
from benchmarks.probing import Probed
from benchmarks.results import ROOT
from benchmarks.scenarios import Seen
from benchmarks.server_scenarios import vllm_bench
from tests.support.sizes import larger

OPTIONS = Namespace(**{**BENCHMARKS["random_mm"].options, "requests": 3})


def test_a_request_that_failed_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def client(command: list[str], **_: Any) -> Any:
        said = dict(pairwise(command))
        path = Path(said["--result-dir"]) / said["--result-filename"]
        found = {"completed": completed, "ttfts": [0.1] * 3, "input_lens": [int(said["--random-input-len"])] * 3}
        path.write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, code, "", "what it said")

    hits = iter(range(0, 100, 7))
    monkeypatch.setattr(subprocess, "run", client)
    monkeypatch.setattr(server_scenarios, "counters", lambda url, of: {"prefix_cache_hits": next(hits)})
    up, seen = Probed(SimpleNamespace(url="http://nowhere"), Path("model"), Path()), Seen()  # type: ignore[arg-type]
    completed, code = 3, 0
    vllm_bench(OPTIONS, up, seen)
    assert [(one.first_token_s, one.prompt_tokens) for one in seen.replies] == [(0.1, OPTIONS.words)] * 3
    assert seen.prefix_cache_hits == 7
    completed = 2
    with pytest.raises(RuntimeError, match="2 of 3 requests: what it said"):
        vllm_bench(OPTIONS, up, seen)
    completed, code = 3, 1
    with pytest.raises(RuntimeError, match="what it said"):
        vllm_bench(OPTIONS, up, seen)


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
