# SPDX-License-Identifier: Apache-2.0
"""With speculative decoding, the second question about an image is a hit as without it, and drafts fare as they did.

Mamba hybrids: ../speculative/test_image_prefix.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.tolerances import TIE, TOLERANCE

from tests.support.engine_configuration import CHOSEN
from tests.support.sizes import larger


def asked(family: str, drafter: str, scratch: Path) -> Any:
    task = json.dumps({"family": family, "drafter": drafter, "scratch": str(scratch)})
    command = [sys.executable, "-m", "tests.engine.image_checkpoints.speculative_worker"]
    environ = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run(command, input=task, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("gemma3", "ngram"),
        pytest.param("gemma4", "ngram", marks=larger),
        pytest.param("gemma3", "eagle", marks=larger),
        pytest.param("gemma3", "draft_model", marks=larger),
    ],
)
def test_second_question_with_a_drafter(family: str, drafter: str, tmp_path: Path) -> None:
    if CHOSEN.runner == 2 and drafter == "ngram":
        pytest.skip("Triton's interpreter can't run vLLM's kernel of ngram (mask has unsupported dtype)")
    if CHOSEN.runner == 1 and drafter == "draft_model":
        pytest.skip("stock vLLM answers wrongly with a draft model on Gemma 3, so there are no checkpoints")
    found = asked(family, drafter, tmp_path)
    on, off = found["on"], found["off"]
    first, later = [0, 3], [1, 2, 4, 5]  # three questions about each of two images
    print(family, drafter, {name: on[name] for name in ("cached", "best", "drafts", "draft_tokens", "accepted_tokens")})
    assert [on["cached"][number] for number in later] == [on["best"][number] for number in later]
    assert all(on["best"][number] > 150 for number in later), "the words before the image alone"
    assert [on["cached"][number] for number in first] == [off["cached"][number] for number in first]
    # The control: without the component vLLM has nothing at the image's end, until it has missed it once.
    assert [off["cached"][number] for number in (1, 4)] == [0, 0]
    for side in (on, off):
        assert side["drafts"] > 20
        assert 0 < side["accepted_tokens"] < side["draft_tokens"]
        assert max(error["error"] for error in side["errors"]) <= TOLERANCE
        assert max(error["worse"] for error in side["errors"]) <= TIE
    assert on["tokens"] == off["tokens"]
    drafted = ("drafts", "draft_tokens", "accepted_tokens")
    assert [on[name] for name in drafted] == [off[name] for name in drafted]
