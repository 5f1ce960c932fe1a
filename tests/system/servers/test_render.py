# SPDX-License-Identifier: Apache-2.0
"""`vllm launch render` beside a server with the same store: what it says of images, and what it does for them.

Its answers are compared with those of stock's, for images that the server has seen and for others.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached

from benchmarks.pictures import SMALL, url_of
from benchmarks.servers import MODEL, counters, zoo_renderer

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("render")]

KNOWN, UNKNOWN = (0, 1), (2, 3)
ARGS = (*CPU_ARGS, "--served-model-name", MODEL, "--limit-mm-per-prompt", '{"image": 4}')
ENV = {"PYTHONHASHSEED": "0"}  # an answer with pixels has the order of a set in it


class Renderers(NamedTuple):
    stock: str
    plugin: str


def asked(url: str, images: tuple[int, ...], path: str = "/render", **more: Any) -> dict[str, Any]:
    """The answer about these images; ids that are made for each request are left out."""
    parts = [{"type": "image_url", "image_url": {"url": url_of(SMALL, image)}} for image in images]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
    answer = httpx.post(f"{url}/v1/chat/completions{path}", json=body, timeout=120).raise_for_status().json()
    return {name: value for name, value in answer.items() if name not in ("request_id", "id", "created")}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renderers]:
    """Of stock and of the plugin, after a server with the plugin has seen the known images and has ended."""
    folder = tmp_path_factory.mktemp("render")
    model = build_cached("qwen3-vl", folder / "model")
    store = {"MMCACHE_STORE": str(folder / "store"), "MMCACHE_DISABLE": "0"}
    with serve(model, log_path=folder / "serve.log", args=ARGS, env=store) as server:
        asked(server.url, KNOWN, path="")
    with (
        zoo_renderer(model, "stock", images=4, log_path=folder / "stock.log", env=ENV) as stock,
        zoo_renderer(model, "mmcache", images=4, log_path=folder / "plugin.log", env={**ENV, **store}) as plugin,
    ):
        yield Renderers(stock.url, plugin.url)


def counted(url: str) -> tuple[float, float]:
    """Images that were decoded, and that the processor ran for."""
    found = counters(url)
    return found.get("images_decoded", 0), found.get("items_processed", 0)


def test_images_that_the_store_knows(renderers: Renderers) -> None:
    before = counted(renderers.plugin)
    said = asked(renderers.plugin, KNOWN, mm_payload="none")
    assert counted(renderers.plugin) == before, "decoded or processed"
    assert said == asked(renderers.stock, KNOWN, mm_payload="none")
    assert len(said["features"]["mm_hashes"]["image"]) == len(KNOWN)
    assert not said["features"].get("kwargs_data")


def test_pixels_are_made_where_they_are_asked_for(renderers: Renderers) -> None:
    """Also beside requests for the same images that want none: 8 at a time."""
    expected = {payload: asked(renderers.stock, KNOWN, mm_payload=payload) for payload in ("none", "tensors")}
    assert expected["tensors"]["features"]["kwargs_data"]
    with ThreadPoolExecutor(8) as threads:
        payloads = ("none", "none", "tensors", "none") * 6
        said = threads.map(lambda payload: asked(renderers.plugin, KNOWN, mm_payload=payload), payloads)
        for payload, answer in zip(payloads, said, strict=True):
            assert answer == expected[payload], payload


def test_images_that_nobody_knows(renderers: Renderers) -> None:
    """The control: they are decoded and processed, once."""
    decoded, processed = counted(renderers.plugin)
    for _ in range(2):
        assert asked(renderers.plugin, UNKNOWN, mm_payload="none") == asked(renderers.stock, UNKNOWN, mm_payload="none")
        assert counted(renderers.plugin) == (decoded + len(UNKNOWN), processed + len(UNKNOWN))
