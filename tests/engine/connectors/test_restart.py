# SPDX-License-Identifier: Apache-2.0
"""KV that outlives its server: vLLM's ExampleConnector keeps it in files, and a second process goes on from them.

Each life of a server is a process of its own. What is loaded ends inside an image, at its end and behind it; answers
are those of Transformers on the cold prompt and of the first life. Negative controls: another picture under the same
uuid, and a picture of another tenant, are not loaded; stock does load the first, and its answer is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.tolerances import TIE, TOLERANCE
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

from tests.engine.connectors.worker import ENDS
from tests.support.sizes import larger

pytestmark = pytest.mark.engine

NAMED = {"ends": "inside", "number": 9, "uuid": "shot"}
OTHER = {"ends": "inside", "number": 10, "uuid": "shot"}
SECRET = "What tenant a has said" + " lamp" * 80


def live(family: str, asks: list[dict[str, Any]], tmp_path: Path, **variables: str) -> list[dict[str, Any]]:
    """What one server answers to these questions; its KV goes to and comes from `tmp_path`."""
    task = {"family": family, "zoo": str(tmp_path / "zoo"), "tier": str(tmp_path / "tier"), "asks": asks}
    for directory in ("zoo", "tier"):
        (tmp_path / directory).mkdir(exist_ok=True)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_") and k != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "tests.engine.connectors.worker"]
    done = subprocess.run(
        command, input=json.dumps(task), env=environ | variables, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def assert_cold(answers: list[dict[str, Any]]) -> None:
    """Each is that of Transformers on the cold prompt."""
    for answer in answers:
        assert answer["error"] <= TOLERANCE, answer["error"]
        assert answer["worse"] <= TIE


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["tokens"] == other["tokens"]
    for here, there in zip(one["logprobs"], other["logprobs"], strict=True):
        left, right = dict(map(tuple, here)), dict(map(tuple, there))
        assert max(abs(left[token] - right[token]) for token in left.keys() & right.keys()) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3-vl", pytest.param("gemma3", marks=larger)])
def test_a_second_life_goes_on(family: str, tmp_path: Path) -> None:
    asks: list[dict[str, Any]] = [{"ends": ends, "number": number} for number, ends in enumerate(ENDS)]
    salted = {"ends": "inside", "number": 11, "salt": "a", "uuid": "shot"}
    first = live(family, [*asks, NAMED, salted, {"text": SECRET, "salt": "a"}], tmp_path)
    cold = [{**ask, "cold": True} for ask in asks]
    others = [OTHER, salted | {"salt": "b"}]
    second = live(family, [*others, {"text": SECRET, "salt": "b"}, *cold, NAMED, salted], tmp_path)

    (*not_found, text), again = second[:3], second[3:]
    assert_cold(first + second)
    for before, after in zip(first, again, strict=False):
        assert after["cached"] == after["found"] > 0
        assert_same(before, after)
    (start, end), found = again[0]["spans"][0], again[0]["found"]
    assert start < found < end
    assert again[1]["found"] == again[1]["spans"][0][1]
    assert again[2]["found"] > again[2]["spans"][0][1]
    for answer in not_found:  # bound to the content, and to the tenant
        assert answer["cached"] <= answer["spans"][0][0] < answer["found"]
    assert text["cached"] == text["found"] > 0, "ExampleConnector keeps tenants apart now: doctor's finding can go"
    # SHA-256 needs no seed: what both have had, has the same keys. Another picture has others.
    known = {key for answer in first for key in answer["keys"]}
    for answer in again[:3]:
        assert set(answer["keys"]) <= known
        assert len(answer["keys"]) >= answer["found"] // 32
    assert set(not_found[0]["keys"]) - known


@larger
def test_stock_loads_by_name(tmp_path: Path) -> None:
    """Negative control of the binding: on stock, another picture under the same uuid gets the first one's KV."""
    live("qwen3-vl", [NAMED], tmp_path, MMCACHE_DISABLE="1")
    (answer,) = live("qwen3-vl", [OTHER], tmp_path, MMCACHE_DISABLE="1")
    assert answer["cached"] == answer["found"] > answer["spans"][0][0]
    assert answer["error"] > 0.1


def test_which_keys_are_those_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SHA-256 needs no seed; XXH3 has a secret of each process until PYTHONHASHSEED is set."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None, raising=False)
    seen: dict[tuple[str, str | None], list[bytes]] = {}
    for name in ("sha256", "xxhash"):
        for seed in (None, "7", "8"):
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
            if seed is not None:
                monkeypatch.setenv("PYTHONHASHSEED", seed)
            for _ in range(2):
                kv_cache_utils.init_none_hash(getattr(hashing, name))
                seen.setdefault((name, seed), []).append(bytes(kv_cache_utils.NONE_HASH))
    assert len(set(seen["sha256", None])) == 1
    assert len(set(seen["xxhash", None])) == 2
    for name in ("sha256", "xxhash"):
        assert len(set(seen[name, "7"])) == len(set(seen[name, "8"])) == 1
        assert seen[name, "7"] != seen[name, "8"]
