# SPDX-License-Identifier: Apache-2.0
"""Real servers: one with two API servers on one engine, whose records each of them shows, and what stock shows."""

from __future__ import annotations

import base64
import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached

from tests.support import files
from tests.support.observing import assert_whole
from tests.support.sizes import larger
from vllm_mmcache.components.observe.record.file import read_records
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.exactness.pictures import ellipses

pytestmark = pytest.mark.engine

ARGS = (*CPU_ARGS, "--served-model-name", "zoo", "--limit-mm-per-prompt", '{"image": 4}', "--enable-prefix-caching")


def picture(name: str) -> dict[str, Any]:
    content = files.saved(ellipses(name, (160, 120)), "PNG", compress_level=0)
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(content).decode()},
    }


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Connection": "close"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def wait_for_records(path: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(read_records(path))) < number:
        time.sleep(0.1)


@larger
def test_records_of_two_api_servers(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    path = tmp_path / "records.jsonl"
    env = {"MMCACHE_OBSERVE": "1", "MMCACHE_OBSERVE_FILE": str(path), "VLLM_CPU_KVCACHE_SPACE": "1"}
    content = [picture("a"), {"type": "text", "text": "What is this?" + " red cat" * 40}]
    talk: list[dict[str, Any]] = [{"role": "user", "content": content}]
    cached: dict[str, int] = {}
    with serve(model, log_path=tmp_path / "log", env=env, args=(*ARGS, "--api-server-count", "2")) as server:
        for turn in range(8):  # each with a connection of its own, which either server may take
            body = {"model": "zoo", "messages": talk, "max_tokens": 8, "temperature": 0}
            answer = post(server.url, body)
            cached[answer["id"]] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            talk += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "-"}]
            talk += [{"role": "user", "content": f"And number {turn}?" + " dog" * 40}]
        wait_for_records(path, len(cached))
        for _ in range(10):  # an idle server may have taken all; of many connections at once both take some
            if len({record.server for record in read_records(path)}) == 2:
                break
            with ThreadPoolExecutor(8) as pool:
                for answer in pool.map(lambda _: post(server.url, body), range(16)):
                    cached[answer["id"]] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            wait_for_records(path, len(cached))
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
            shown = response.read().decode()
    records = {record.request_id: record for record in read_records(path)}
    assert set(records) == set(cached)
    assert len({record.id for record in read_records(path)}) == len(cached)
    for name, tokens in cached.items():
        assert_whole(records[name])
        assert records[name].reused_tokens == tokens
        assert records[name].model == "zoo"
    first, *later = (records[name] for name in cached)
    assert first.misses[0].reason is Reason.NEW_CONTENT
    assert all(record.reused_tokens > 0 for record in later)
    images = [next(s.image for s in record.segments if s.image) for record in records.values()]
    assert {image.body for image in images} == {"lifted"}
    assert images[-1].features == "not_needed"
    assert len({record.server for record in records.values()}) == 2
    reused = sum(float(x) for x in re.findall(r"^mmcache:prompt_tokens_total\{[^}]*reused[^}]*\} (\S+)", shown, re.M))
    assert reused == sum(cached.values())
