# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with the plugin: what starts on stock starts, and says the same; what doesn't, doesn't alike.

vLLM's drafters look at the target's class by name (v1/spec_decode/llm_base_proposer.py), so a class of the plugin's own
stopped Qwen3.5 with MTP and Qwen3-VL with EAGLE. Both sides are processes of their own, at the same time. CI runs
those two, `make matrix` (TEST_MATRIX=1) every family with each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.tolerances import BF16_SELF_TOLERANCE, TIE, TOLERANCE
from mmcache_tools.zoo import BY_NAME, FAMILIES

from tests.support.sizes import WHOLE

pytestmark = pytest.mark.engine

GDN = ("qwen3.5", "qwen3.5-moe")
# With EAGLE heads; of the others vLLM knows neither where the image token is written nor, for EAGLE-3, the layers.
EAGLE = ("qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "gemma3", *GDN)
KNOWN = ("qwen2-vl", *EAGLE)  # with every drafter; families that come later are run with ngram
STOCK_IS_WRONG = (
    "gemma3",
    "gemma4",
)  # about images on the CPU: the plugin's answers are Transformers', stock's are not

NOT_MTP = ("start", "NotImplementedError", "Unsupported speculative method")
NO_IMAGE_TOKEN = ("start", "AttributeError", "no attribute 'image_token_index'")
NO_EAGLE3 = ("start", "RuntimeError", "does not support EAGLE3")
# Triton's kernel that copies GDN states between blocks; without prefix caching it isn't needed.
NO_TRITON = ("answers", "TypeError", "'function' object is not subscriptable")
RUNS = ("end", None, "")

Case = tuple[str, bool]  # drafter, prefix caching


def outcome(family: str, drafter: str, prefix_caching: bool) -> tuple[str, str | None, str]:
    """What vLLM 0.32's CPU build does: how far it comes, the error's class, and words of it."""
    if drafter == "mtp" and family not in GDN:
        return NOT_MTP
    if family in GDN:
        return NO_TRITON if prefix_caching else RUNS
    if drafter.startswith("eagle") and family not in EAGLE:
        return NO_IMAGE_TOKEN
    return NO_EAGLE3 if (family, drafter) == ("gemma3", "eagle3") else RUNS


def cases() -> list[Any]:
    """Family and drafters of each process; ngram is the last in its process, see worker.py."""
    plan: list[tuple[str, tuple[Case, ...]]] = [
        ("qwen3.5", (("mtp", False),)),
        ("qwen3-vl", (("eagle3", True),)),
    ]
    if WHOLE:
        plan = []
        for family in FAMILIES:
            heads = ("mtp", "eagle", "eagle3") if family in KNOWN else ()
            caching = (False, True) if family in GDN else (True,)
            plan += [(family, (*((head, c) for c in caching for head in heads), ("ngram", caching[0])))]
            plan += [(family, (("ngram", c),)) for c in caching[1:]]
    name = {False: "", True: "-prefix"}
    return [
        pytest.param(family, drafters, id=f"{family}-" + "-".join(drafter + name[c] for drafter, c in drafters))
        for family, drafters in plan
    ]


def both_sides(family: str, drafters: tuple[Case, ...], scratch: Path) -> dict[str, list[dict[str, Any]]]:
    """What each drafter came to, on stock and with the plugin."""
    running = {}
    for side in ("stock", "plugin"):
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
        environ |= {"MMCACHE_DISABLE": "1"} if side == "stock" else {}
        task = {"family": family, "drafters": drafters, "scratch": str(scratch / side)}
        (scratch / f"{side}.json").write_text(json.dumps(task))
        with (scratch / f"{side}.json").open() as told, (scratch / f"{side}.err").open("w") as errors:
            running[side] = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.speculative.worker"],
                stdin=told, stdout=subprocess.PIPE, stderr=errors, env=environ, text=True,
            )  # fmt: skip
    found = {}
    try:
        for side, process in running.items():
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, (scratch / f"{side}.err").read_text()[-3000:]
            found[side] = json.loads(output.strip().splitlines()[-1])
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return found


def assert_same(answers: list[dict[str, Any]], others: list[dict[str, Any]], tolerance: float, tie: float) -> float:
    """Equal tokens but for ties, log-probabilities within the tolerance. Returns the largest difference."""
    worst = 0.0
    for number, (answer, other) in enumerate(zip(answers, others, strict=True)):
        for step, (one, two) in enumerate(zip(answer["tokens"], other["tokens"], strict=True)):
            here, there = dict(map(tuple, answer["logprobs"][step])), dict(map(tuple, other["logprobs"][step]))
            shared = here.keys() & there.keys()
            assert shared, f"answer {number}, step {step}: no token is among the best of both"
            delta = max(abs(here[token] - there[token]) for token in shared)
            assert delta <= tolerance, f"answer {number}, step {step}: {delta:.1e} apart"
            worst = max(worst, delta)
            if one != two:
                assert abs(here[one] - there[two]) <= tie, f"answer {number}, step {step}: tokens {one} and {two}"
                break  # what follows answers another text
    return worst


def came_to(side: dict[str, Any]) -> list[Any]:
    """How far an engine came, and the error; without the answers."""
    return [side["stage"], side["error"], side["says"]]


@pytest.mark.parametrize(("family", "drafters"), cases())
def test_drafters(family: str, drafters: tuple[Case, ...], tmp_path: Path) -> None:
    found = both_sides(family, drafters, tmp_path)
    exact = BY_NAME[family].dtype == "float32"
    for (drafter, prefix_caching), stock, plugin in zip(drafters, found["stock"], found["plugin"], strict=True):
        label = f"{family} {drafter} prefix_caching={prefix_caching}"
        *expected, words = outcome(family, drafter, prefix_caching)
        for side in (stock, plugin):
            assert came_to(side)[:2] == expected, (
                f"{label}: {came_to(stock)} on stock, {came_to(plugin)} with the plugin"
            )
            assert words in side["says"], f"{label}: {side['says']}"
        if stock["error"] is not None:
            print(f"{label}: {stock['error']} at {stock['stage']} on both sides")
            continue
        assert (stock["plugin"], plugin["plugin"]) == (False, True)
        for side in (stock, plugin):
            assert side["drafts"] > 20, f"{label}: hardly anything was drafted, so nothing was tested"
            assert 0 < side["accepted_tokens"] < side["draft_tokens"]
        if prefix_caching:
            assert plugin["answers"][1]["cached"] > 0
            assert plugin["answers"][1]["cached"] >= stock["answers"][1]["cached"]
        if family not in STOCK_IS_WRONG:
            bounds = (TOLERANCE, TIE) if exact else (BF16_SELF_TOLERANCE, 2 * BF16_SELF_TOLERANCE)
            delta = assert_same(plugin["answers"], stock["answers"], *bounds)
            print(f"{label}: {delta:.1e} from stock")
        if exact:
            error, worse = (max(answer[name] for answer in plugin["answers"]) for name in ("error", "worse"))
            print(f"{label}: {error:.1e} from Transformers")
            assert error <= TOLERANCE
            assert worse <= TIE
        print(f"{label}: {plugin['accepted_tokens']} of {plugin['draft_tokens']} tokens accepted in {plugin['drafts']}")


def test_differences_are_detected() -> None:
    """Negative control: another token, or a log-probability beyond the tolerance."""
    answer = {"tokens": [1, 2], "logprobs": [[[1, -0.1], [2, -3.0]], [[2, -0.2], [1, -2.0]]]}
    assert assert_same([answer], [answer], TOLERANCE, TIE) == 0.0
    off = {"tokens": [1, 2], "logprobs": [[[1, -0.1], [2, -3.0]], [[2, -0.2], [1, -2.002]]]}
    with pytest.raises(AssertionError, match=r"step 1: 2\.0e-03 apart"):
        assert_same([off], [answer], TOLERANCE, TIE)
    other = answer | {"tokens": [1, 1]}
    with pytest.raises(AssertionError, match="tokens 1 and 2"):
        assert_same([other], [answer], TOLERANCE, TIE)
