# SPDX-License-Identifier: Apache-2.0
"""Every endpoint that takes images knows the tenant where they are opened, and refuses to do without, if told to."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.identity.attacks.target import MODEL, Target, fresh, picture, url_of
from tests.lazy_media import files
from vllm_mmcache.demo.server import CPU_ARGS, serve
from vllm_mmcache.zoo import build_cached

pytestmark = pytest.mark.engine

ARGS = (*CPU_ARGS, "--served-model-name", MODEL, "--enable-prompt-tokens-details", "--enable-scale-out")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    log_path = tmp_path_factory.mktemp("log") / "log"
    with serve(model, log_path=log_path, env={"MMCACHE_REQUIRE_SALT": "1"}, args=ARGS) as running:
        yield Target(running.url)


def requests(image: bytes, token_ids: list[int]) -> dict[str, dict[str, Any]]:
    url = url_of(image)
    part = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    block = {"type": "image", "source": source}
    input_image = {"type": "input_image", "detail": "auto", "image_url": url}
    return {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/chat/completions/batch": {"messages": [messages], "max_tokens": 1},
        "/v1/chat/completions/render": {"messages": messages},
        "/v1/responses": {"input": [{"role": "user", "content": [input_image]}], "max_output_tokens": 1},
        "/v1/messages": {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1},
        "/inference/v1/generate": {
            "token_ids": token_ids, "content_parts": [{"type": "image_url", "url": url}],
            "sampling_params": {"max_tokens": 1},
        },
    }  # fmt: skip


def prompt_ids(server: Target) -> list[int]:
    """Tokens of a prompt with one placeholder that is not expanded yet."""
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    answer = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": text}, timeout=60)
    found: list[int] = answer.raise_for_status().json()["tokens"]
    return found


PATHS = list(requests(b"", []))


@pytest.mark.parametrize("path", PATHS)
def test_tenants_know_their_own_images(server: Target, path: str) -> None:
    image = files.saved(picture(fresh(path), (96, 96)), "PNG", compress_level=0)
    body = {"model": MODEL, **requests(image, prompt_ids(server))[path]}
    refused = httpx.post(server.url + path, json=body, timeout=60)
    assert refused.status_code == 400
    assert "cache_salt" in refused.text
    decoded = []
    for salt in ("a", "a", "b", "b"):
        before = server.counters()["mmcache:images_decoded"]
        answer = httpx.post(server.url + path, json={**body, "cache_salt": salt}, timeout=60)
        assert answer.status_code == 200, answer.text
        decoded.append(server.counters()["mmcache:images_decoded"] - before)
    assert decoded == [1, 0, 1, 0]


def test_text_needs_no_salt(server: Target) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_the_shape_of_the_refusal(server: Target) -> None:
    body = {"model": MODEL, **requests(files.good()["png"], [])["/v1/chat/completions"]}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "cache_salt", 400)
