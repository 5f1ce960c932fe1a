# SPDX-License-Identifier: Apache-2.0
"""With speculative decoding, the second question about an image is a hit as without it, and drafts fare as they did.

Mamba hybrids have no checkpoints then: wrong prefix hits of their states are reported (vLLM 53912).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine_configuration import CHOSEN
from tests.sizes import larger
from vllm_mmcache.components.image_checkpoints.rules import state_in
from vllm_mmcache.prove.answers import TIE, TOLERANCE


def asked(family: str, drafter: str, scratch: Path) -> Any:
    task = json.dumps({"family": family, "drafter": drafter, "scratch": str(scratch)})
    command = [sys.executable, "-m", "tests.image_checkpoints.speculative_worker"]
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
    ],
)
def test_second_question_with_a_drafter(family: str, drafter: str, tmp_path: Path) -> None:
    if CHOSEN.runner == 2 and drafter == "ngram":
        pytest.skip("Triton's interpreter can't run vLLM's kernel of ngram (mask has unsupported dtype)")
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


@pytest.mark.parametrize(
    ("is_hybrid", "is_v2", "drafter", "said"),
    [
        (False, False, None, "None"),
        (True, False, None, "None"),
        (False, False, "ngram", "None"),
        (False, True, "ngram", "off: not shown to be right with speculative decoding by ngram on model runner V2"),
        (False, True, "eagle", "None"),
        (False, False, "mtp", "off: not shown to be right with speculative decoding by mtp"),
        (True, False, "ngram", "off: wrong prefix hits of Mamba states are reported with speculative"),
    ],
)
def test_hybrids_and_other_drafters_have_none(is_hybrid: bool, is_v2: bool, drafter: str | None, said: str) -> None:
    takes_images = SimpleNamespace(get_limit_per_prompt=lambda modality: 999)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(is_hybrid=is_hybrid, multimodal_config=takes_images),
        speculative_config=SimpleNamespace(method=drafter) if drafter else None,
        kv_transfer_config=None,
        use_v2_model_runner=is_v2,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    assert str(state_in(config)).startswith(said)
