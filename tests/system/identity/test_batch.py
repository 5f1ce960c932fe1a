# SPDX-License-Identifier: Apache-2.0
"""`vllm run-batch`: each line of a batch file has a tenant of its own, the same as over HTTP, or is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.server import CPU_ARGS, CPU_ENV
from mmcache_tools.zoo import build_cached

from tests.support.sizes import larger
from tests.support.target import MODEL, MODES, png, url_of
from tests.system.cli.test_commands import mmcache
from vllm_mmcache.base.tenant import parse_source
from vllm_mmcache.components.identity.identifiers import identifier

pytestmark = pytest.mark.answers


def line(number: int, image: bytes, tenant: str | None) -> str:
    part = {"type": "image_url", "image_url": {"url": url_of(image)}}
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 2,
        "temperature": 0,
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}],
    }
    if tenant is not None:
        body["cache_salt"] = tenant
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.mark.engine
@pytest.mark.parametrize("mode", [pytest.param("body", marks=larger), "header", pytest.param("api_key", marks=larger)])
def test_lines_have_tenants(mode: str, tmp_path: Path) -> None:
    """The last line's tenant is not that of the others, which run at the same time."""
    model, store = build_cached("qwen3-vl", tmp_path / "zoo"), tmp_path / "store"
    image, public = png("of two tenants"), png("of nobody")
    given = [(image, "a"), (image, "a"), (public, None), (image, "b")]
    (tmp_path / "in").write_text("\n".join(line(number, *one) for number, one in enumerate(given)) + "\n")
    command = [sys.executable, "-m", "vllm_mmcache.cli.vllm_main", "run-batch", "-i", str(tmp_path / "in")]
    command += ["-o", str(tmp_path / "out"), "--model", str(model), "--served-model-name", MODEL, *CPU_ARGS]
    command += [
        "--shutdown-timeout",
        "60",
    ]  # by default vLLM kills the engine at once, which may have features to write
    env = {**os.environ, **CPU_ENV, "MMCACHE_STORE": str(store), "MMCACHE_REQUIRE_TENANT": "1"}
    done = subprocess.run(
        command, env={**env, "MMCACHE_TENANT_FROM": MODES[mode]}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = [json.loads(one) for one in (tmp_path / "out").read_text().splitlines()]
    assert [one["response"]["status_code"] for one in answers] == [200, 200, 400, 200]
    assert "Parameter 'cache_salt' is required" in json.dumps(answers[2])
    said = {one["response"]["body"]["choices"][0]["message"]["content"] for one in answers if one["error"] is None}
    assert len(said) == 1
    kept = json.loads(mmcache("store", "ls", "--dir", str(store), "--json").stdout)
    names = {package["content_id"] for package in kept["packages"]}
    source = parse_source(MODES[mode])
    assert names == {identifier("image", plain(image, model), salt=source.salt_of(name)) for name in ("a", "b")}


def plain(image: bytes, model: Path) -> str:
    """The content id of an image without a tenant: vLLM's own."""
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.media.image import ImageMediaIO

    return str(MultiModalHasher.hash_kwargs("blake3", model_id=str(model), image=ImageMediaIO().load_bytes(image)))
