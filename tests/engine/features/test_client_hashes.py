# SPDX-License-Identifier: Apache-2.0
"""Images that come processed, with mm_hashes of the client's making: nothing is kept of them, and nothing taken."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached
from vllm import SamplingParams

from tests.support.store_server import Put
from tests.support.tiers import LONG_S, within
from tests.support.towers import Runs, question, slots
from tests.system.image_extraction.test_server import MODEL, chat, counters, image_url, picture
from vllm_mmcache.content import image_namer

pytestmark = pytest.mark.engine

ARGS = (*CPU_ARGS, "--served-model-name", MODEL, "--enable-prefix-caching", "--enable-scale-out")


def post(url: str, path: str, request: dict[str, Any]) -> Any:
    answer = httpx.post(url + path, json=request, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_hash_of_the_client_s_is_not_kept(tmp_path: Path) -> None:
    """On a real server: rendered, sent with another hash, answered, and not in the store; as a chat's image is."""
    model, store = build_cached("qwen3-vl", tmp_path / "zoo"), tmp_path / "store"

    def kept() -> int:
        return len(list(store.glob("features/??/*.safetensors")))

    with serve(model, log_path=tmp_path / "log", env={"MMCACHE_STORE": str(store)}, args=ARGS) as server:
        rendered = post(server.url, "/v1/chat/completions/render", chat(image_url(picture("named"))))
        for place in rendered["features"]["mm_placeholders"]["image"]:
            place["offset"] += 1  # no two prompts share their beginning
        sampling = {"max_tokens": 4, "temperature": 0, "extra_args": {image_namer._MARK: False}}
        for number, name in enumerate(("of my own", "another", rendered["features"]["mm_hashes"]["image"][0])):
            features = {**rendered["features"], "mm_hashes": {"image": [name]}}
            request = {"token_ids": [number, *rendered["token_ids"]], "features": features, "sampling_params": sampling}
            post(server.url, "/inference/v1/generate", request)
        assert counters(server.url)["tower_images"] == 3
        parts = [{"type": "image_url", "url": image_url(picture("kept"))["image_url"]["url"]}]
        text = "<|vision_start|><|image_pad|><|vision_end|>What?"
        token_ids = post(server.url, "/tokenize", {"model": MODEL, "prompt": text})["tokens"]
        opened = {"token_ids": token_ids, "content_parts": parts, "sampling_params": sampling}
        post(server.url, "/inference/v1/generate", opened)  # the control: this server has named it by its content
        within(LONG_S, lambda: kept() > 0)
        assert kept() == 1


def test_the_engine_neither_takes_nor_keeps(alone: EnginePool, put: Put) -> None:
    put()
    rig, runs = alone.get(EngineConfig("qwen3-vl")), Runs()
    prompt, images = rig.render([question(610)])
    data = {"prompt": prompt, "multi_modal_data": {"image": list(images)}}

    def ask(named: bool = False) -> list[int]:
        rig.forget_all_but_features()
        before = image_namer.PROCESSED_BY_CLIENT.set(named)
        try:
            (output,) = rig.llm.generate([data], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        finally:
            image_namer.PROCESSED_BY_CLIENT.reset(before)
        return list(output.outputs[0].token_ids)

    first = ask(named=True)
    assert (runs.new(), len(slots(rig))) == (1, 0)
    assert ask() == first
    assert (runs.new(), len(slots(rig))) == (1, 1)
    assert ask() == first
    assert runs.new() == 0, "the control: another request takes what is kept"
    assert ask(named=True) == first
    assert (runs.new(), len(slots(rig))) == (1, 1)
